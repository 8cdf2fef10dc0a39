"""The bodies of /v1/messages as chat requests."""

from __future__ import annotations

from typing import Protocol, cast

import msgspec

from trueline.errors import UsageError
from trueline.grammar.structured import StructuredOutputsParams
from trueline.server.protocol.decode import decode
from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.forms import AskedForm
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.messages_api.bodies import (
    AnyChoice,
    CountTokensBody,
    InputTool,
    MessagesBody,
    MessagesInput,
    NoToolChoice,
    OneToolChoice,
    ThinkingDisabled,
    ThinkingEnabled,
)
from trueline.server.protocol.messages_api.content import as_messages
from trueline.server.protocol.requests import (
    ChatRequest,
    Conversation,
    TokenizeRequest,
    check_form,
    sampling_params,
    template_arguments,
)
from trueline.server.protocol.tools import Choice, ToolsAsked, offered_function, tools_asked
from trueline.utils.json_types import JSON

NAMES = {
    "messages": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""What chats call otherwise."""


class MessagesRequest(ChatRequest, frozen=True, kw_only=True):
    pass


class GenerationFields(Protocol):
    """Of what is added to the body, the fields that are read by name."""

    stream: bool | None
    priority: int | None
    cache_salt: str | None


class _Function(msgspec.Struct, frozen=True):
    name: str
    parameters: JSON
    strict: bool | None


def read_messages(body: bytes, limits: RequestLimits) -> MessagesRequest:
    fields = decode(MessagesBody, body, limits)
    asked = cast("GenerationFields", fields)
    model = limits.model(fields.model)
    length: dict[str, int | None] = {"max_tokens": fields.max_tokens}
    limits.check_answer(length)
    stop = {"stop": fields.stop_sequences} if fields.stop_sequences else {}
    params = sampling_params(fields, limits, {"max_tokens": fields.max_tokens, **stop})
    conversation, form = _conversation(fields), _form(fields)
    check_form(form, conversation.tools)
    thinking = fields.thinking
    return MessagesRequest(
        model=model,
        params=params,
        answer_length=length,
        stream=bool(asked.stream),
        include_usage=False,
        continuous_usage=False,
        logprobs=None,
        prompt_logprobs=None,
        return_token_ids=False,
        tokens_as_ids=False,
        truncate_prompt_tokens=None,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        form=form,
        conversation=conversation,
        include_reasoning=True,
        thinking_budget=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
    )


def read_count_tokens(body: bytes, limits: RequestLimits) -> TokenizeRequest:
    fields = decode(CountTokensBody, body, limits)
    return TokenizeRequest(
        model=limits.model(fields.model),
        text=_conversation(fields),
        add_special_tokens=False,
        return_token_strs=False,
    )


def _conversation(fields: MessagesInput) -> Conversation:
    messages = as_messages(fields.system, fields.messages)
    if not messages:
        raise bad_request("messages: accepted: messages that say something", "messages")
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise bad_request(
            "messages: the last one has a tool_use; accepted: a tool_result after it", "messages"
        )
    thinking = fields.thinking
    return Conversation(
        messages=messages,
        chat_template=None,
        chat_template_kwargs=template_arguments(fields.chat_template_kwargs),
        reasoning_effort=None if fields.output_config is None else fields.output_config.effort,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tools=_tools(fields),
        thinking=None if thinking is None else not isinstance(thinking, ThinkingDisabled),
    )


def _tools(fields: MessagesInput) -> ToolsAsked | None:
    offered = [
        offered_function(f"tools[{i}]", _Function(tool.name, tool.input_schema, tool.strict),
                         _shown(tool), schema_field="input_schema")
        for i, tool in enumerate(fields.tools or ())
    ]  # fmt: skip
    choice: Choice = "auto"
    named, parallel = None, True
    match fields.tool_choice:
        case NoToolChoice():
            choice = "none"
        case OneToolChoice(name=name, disable_parallel_tool_use=one):
            choice, named, parallel = "required", name, not one
        case AnyChoice(disable_parallel_tool_use=one):
            choice, parallel = "required", not one
        case None:
            pass
        case auto:
            parallel = not auto.disable_parallel_tool_use
    return tools_asked(
        offered, choice, parallel=parallel, named=named, choice_field="tool_choice.name"
    )


def _shown(tool: InputTool) -> JSON:
    return {"name": tool.name, "description": tool.description, "parameters": tool.input_schema,
            "strict": tool.strict}  # fmt: skip


def _form(fields: MessagesInput) -> AskedForm | None:
    config = fields.output_config
    if config is None or config.format is None:
        return None
    name = "output_config.format"
    try:
        asked = StructuredOutputsParams(json=config.format.schema)
    except UsageError as error:
        raise bad_request(str(error), f"{name}.schema") from None
    return AskedForm(name, asked, {"json": f"{name}.schema"})
