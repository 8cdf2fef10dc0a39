"""The body of /v1/responses as a chat request."""

from __future__ import annotations

from typing import cast

from trueline.errors import UsageError
from trueline.grammar.structured import StructuredOutputsParams
from trueline.server.protocol.decode import decode
from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.forms import AskedForm, JsonObjectFormat
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.requests import (
    ChatRequest,
    Conversation,
    check_form,
    sampling_params,
    template_arguments,
)
from trueline.server.protocol.responses_api.bodies import (
    FunctionChoice,
    ResponsesBody,
    ResponsesFields,
    ResponsesGenerationFields,
    SchemaFormat,
)
from trueline.server.protocol.responses_api.items import InputMessage, as_messages, read_items
from trueline.server.protocol.tools import ToolsAsked, offered_function, tools_asked

NAMES = {"messages": "input", "reasoning_effort": "reasoning.effort"}
"""What chats call otherwise."""
LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(ChatRequest, frozen=True, kw_only=True):
    fields: ResponsesFields
    """As they were asked: a response repeats some."""
    num_bytes: int
    """Of the body."""


def read_responses(body: bytes, limits: RequestLimits) -> ResponsesRequest:
    fields = decode(ResponsesBody, body, limits)
    asked = cast("ResponsesGenerationFields", fields)
    model = limits.model(fields.model)
    scored = LOGPROBS in (fields.include or ())
    if asked.top_logprobs and not scored:
        raise bad_request(f"top_logprobs: accepted: where include has {LOGPROBS}", "top_logprobs")
    top = limits.logprobs("top_logprobs", asked.top_logprobs)
    logprobs = (top or 0) if scored else None
    length = {"max_output_tokens": fields.max_output_tokens}
    limits.check_answer(length)
    params = sampling_params(
        fields, limits, {"logprobs": logprobs, "max_tokens": fields.max_output_tokens}
    )
    if asked.truncate_prompt_tokens == 0:
        raise bad_request(
            "truncate_prompt_tokens = 0: accepted: a whole number from 1 up, or -1",
            "truncate_prompt_tokens",
        )
    conversation, form = _conversation(fields), _form(fields)
    check_form(form, conversation.tools)
    return ResponsesRequest(
        model=model,
        params=params,
        answer_length=length,
        stream=bool(asked.stream),
        include_usage=False,
        continuous_usage=False,
        logprobs=logprobs,
        prompt_logprobs=None,
        return_token_ids=False,
        tokens_as_ids=False,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        form=form,
        conversation=conversation,
        include_reasoning=True,
        thinking_budget=fields.thinking_token_budget,
        fields=fields,
        num_bytes=len(body),
    )


def _conversation(fields: ResponsesFields) -> Conversation:
    given = fields.input
    items = (
        [InputMessage(role="user", content=given)] if isinstance(given, str) else read_items(given)
    )
    messages = as_messages(fields.instructions, items)
    if not messages:
        raise bad_request("input: accepted: items that say something", "input")
    return Conversation(
        messages=messages,
        chat_template=None,
        chat_template_kwargs=template_arguments(fields.chat_template_kwargs),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        add_generation_prompt=True,
        continue_final_message=False,
        tools=_tools(fields),
    )


def _tools(fields: ResponsesFields) -> ToolsAsked | None:
    offered = []
    for i, tool in enumerate(fields.tools or ()):
        written = {"name": tool.name, "description": tool.description,
                   "parameters": tool.parameters, "strict": tool.strict}  # fmt: skip
        offered.append(offered_function(f"tools[{i}]", tool, written))
    choice = fields.tool_choice
    named = choice.name if isinstance(choice, FunctionChoice) else None
    return tools_asked(
        offered,
        "required" if isinstance(choice, FunctionChoice) else choice or "auto",
        parallel=fields.parallel_tool_calls is not False,
        named=named,
    )


def _form(fields: ResponsesFields) -> AskedForm | None:
    match fields.text and fields.text.format:
        case JsonObjectFormat():
            found = StructuredOutputsParams(json_object=True)
            return AskedForm("text.format", found, {"json_object": "text.format"})
        case SchemaFormat(schema=schema):
            try:
                found = StructuredOutputsParams(json=schema)
            except UsageError as error:
                raise bad_request(str(error), "text.format.schema") from None
            return AskedForm("text.format", found, {"json": "text.format.schema"})
        case _:
            return None
