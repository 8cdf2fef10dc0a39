"""Requests and responses of the OpenAI-compatible endpoints as plain data: no HTTP, no engine.

`read_*` take a body and give a checked request, or raise ApiError. `*_prompt*` tokenize its
text. `*Writer` encode the engine's outputs as responses.
"""

from trueline.server.protocol.chat_chunks import ChatWriter
from trueline.server.protocol.errors import ApiError, from_usage
from trueline.server.protocol.failure import failure
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.openapi import openapi
from trueline.server.protocol.prompts import (
    chat_prompt,
    completion_prompts,
    detokenize,
    tokenize,
    tokenizer_info,
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
from trueline.server.protocol.stream_chunks import CompletionWriter

__all__ = [
    "ApiError",
    "ChatRequest",
    "ChatWriter",
    "CompletionRequest",
    "CompletionWriter",
    "Health",
    "ModelCard",
    "ModelList",
    "RequestLimits",
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
    "tokenizer_info",
]
