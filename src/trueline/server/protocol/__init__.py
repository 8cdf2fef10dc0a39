"""Requests and answers of the OpenAI-compatible endpoints as plain data: no HTTP, no engine.

`read_*` take a body and give a checked request, or raise ApiError. `*_prompt*` make tokens of its
text. `*Frames` make bytes of what the engine says.
"""

from trueline.server.protocol.errors import ApiError, from_usage
from trueline.server.protocol.frames import ChatFrames, CompletionFrames, failure
from trueline.server.protocol.limits import Limits
from trueline.server.protocol.openapi import openapi
from trueline.server.protocol.prompts import (
    chat_prompt,
    completion_prompts,
    detokenize,
    tokenize,
)
from trueline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from trueline.server.protocol.responses import Health, ModelCard, ModelList, Version

__all__ = [
    "ApiError",
    "ChatFrames",
    "ChatRequest",
    "CompletionFrames",
    "CompletionRequest",
    "Health",
    "Limits",
    "ModelCard",
    "ModelList",
    "Version",
    "chat_prompt",
    "completion_prompts",
    "detokenize",
    "failure",
    "from_usage",
    "openapi",
    "read_chat",
    "read_completion",
    "read_detokenize",
    "read_tokenize",
    "tokenize",
]
