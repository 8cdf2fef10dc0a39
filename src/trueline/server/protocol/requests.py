"""Requests that have been read: checked, with every default filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict, cast

import msgspec

from trueline.engine.params import SamplingParams
from trueline.errors import UsageError
from trueline.server.protocol.bodies import (
    SAMPLING,
    Body,
    ChatBody,
    ChatGenerationFields,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    StreamOptions,
    Templating,
    TokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from trueline.server.protocol.decode import decode
from trueline.server.protocol.errors import bad_request, from_usage
from trueline.server.protocol.forms import AskedForm, FormFields, read_form
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.tools import ToolsAsked, read_tools
from trueline.utils.json_types import JSON

_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
"""Names that chat_template_kwargs cannot have: the request itself says them."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    params: SamplingParams
    """For the engine. It may ask for more than the client: see `logprobs`."""
    answer_length: dict[str, int | None]
    """The fields that say how long the answer is to be, with what the client itself said."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Usage in every chunk of a stream."""
    logprobs: int | None
    """How many of the likeliest tokens to show with each one; None: no logprobs."""
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    """In logprobs."""
    truncate_prompt_tokens: int | None
    """Of each prompt no more than its last ones; -1: as many as leave room for the answer."""
    priority: int
    cache_salt: str | None
    form: AskedForm | None
    """What the answer must be like."""

    @property
    def scores_per_prompt_token(self) -> int | None:
        """Itself, and the likeliest ones."""
        asked = self.params.prompt_logprobs
        return None if asked is None else 1 + asked


class CompletionRequest(GenerateRequest, frozen=True, kw_only=True):
    """`max_tokens` = 0 asks for nothing but the prompt, as scoring with `echo` and `logprobs`
    does. The engine cannot end before a token: it is asked for one, which is not shown."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    generates: bool
    """False where max_tokens is 0."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[JSON]
    chat_template: str | None
    """In place of the model's own."""
    chat_template_kwargs: JSON
    reasoning_effort: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: ToolsAsked | None = None
    thinking: bool | None = None
    """Whether the answer is to begin with reasoning, where the request says so by itself: then
    the template's switch is set, if there is one."""


class ChatRequest(GenerateRequest, frozen=True, kw_only=True):
    conversation: Conversation
    include_reasoning: bool
    thinking_budget: int | None
    """Tokens of reasoning after which its end is forced."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    text: str | Conversation
    add_special_tokens: bool
    return_token_strs: bool


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    tokens: list[int]


def read_completion(body: bytes, limits: RequestLimits) -> CompletionRequest:
    fields = decode(CompletionBody, body, limits)
    asked = cast("GenerationFields", fields)
    model = limits.model(fields.model)
    prompts = _prompts(fields.prompt, limits)
    echo, generates = bool(fields.echo), fields.max_tokens != 0
    logprobs = limits.logprobs("logprobs", asked.logprobs)
    prompt_logprobs = limits.logprobs("prompt_logprobs", asked.prompt_logprobs)
    scored = [count for count in (prompt_logprobs, logprobs if echo else None) if count is not None]
    changes: dict[str, int | None] = {
        "logprobs": logprobs,
        "prompt_logprobs": max(scored, default=None),
    }
    if not generates:
        if asked.min_tokens:
            raise bad_request(
                f"min_tokens = {asked.min_tokens}: accepted: at most max_tokens, which is 0",
                "min_tokens",
            )
        changes["max_tokens"] = 1
    params = sampling_params(fields, limits, changes)
    if fields.best_of is not None and fields.best_of != params.n:
        raise bad_request(
            f"best_of = {fields.best_of}: accepted: n, which is {params.n}; for a choice among "
            "more, draw n and rank them by their logprobs",
            "best_of",
        )
    _check_sequences(len(prompts), params.n, limits)
    return CompletionRequest(
        model=model,
        params=params,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompts=prompts,
        echo=echo,
        generates=generates,
        answer_length=_answer_length(fields, limits, "max_tokens", "min_tokens"),
        **_generating(asked),
    )


def read_chat(body: bytes, limits: RequestLimits) -> ChatRequest:
    fields = decode(ChatBody, body, limits)
    asked = cast("ChatGenerationFields", fields)
    model = limits.model(fields.model)
    if asked.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs: accepted: where logprobs is true", "top_logprobs")
    top = limits.logprobs("top_logprobs", asked.top_logprobs)
    logprobs = (top or 0) if fields.logprobs else None
    prompt_logprobs = limits.logprobs("prompt_logprobs", asked.prompt_logprobs)
    changes = {
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "max_tokens": _either(fields, "max_completion_tokens", "max_tokens", "its older name"),
    }
    params = sampling_params(fields, limits, changes)
    _check_sequences(1, params.n, limits)
    conversation, shared = _conversation(fields, limits, body), _generating(asked)
    check_form(shared["form"], conversation.tools)
    return ChatRequest(
        model=model,
        params=params,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        conversation=conversation,
        include_reasoning=fields.include_reasoning is not False,
        thinking_budget=_either(
            fields, "thinking_token_budget", "thinking_budget", "its name elsewhere"
        ),
        answer_length=_answer_length(
            fields, limits, "max_completion_tokens", "max_tokens", "min_tokens"
        ),
        **shared,
    )


def read_tokenize(body: bytes, limits: RequestLimits) -> TokenizeRequest:
    """A text, or messages: the two have different defaults."""
    is_chat = decode(TokenizeBody, body, limits).messages is not msgspec.UNSET
    fields: TokenizeChatBody | TokenizePromptBody
    if is_chat:
        fields = decode(TokenizeChatBody, body, limits)
    else:
        fields = decode(TokenizePromptBody, body, limits)
    model = limits.model(fields.model)
    special = fields.add_special_tokens
    return TokenizeRequest(
        model=model,
        text=fields.prompt
        if isinstance(fields, TokenizePromptBody)
        else _conversation(fields, limits, body),
        # a template writes its own
        add_special_tokens=not is_chat if special is None else special,
        return_token_strs=bool(fields.return_token_strs),
    )


def read_detokenize(body: bytes, limits: RequestLimits) -> DetokenizeRequest:
    fields = decode(DetokenizeBody, body, limits)
    model = limits.model(fields.model)
    _check_ids("tokens", fields.tokens, limits)
    return DetokenizeRequest(model=model, tokens=fields.tokens)


def check_form(form: AskedForm | None, tools: ToolsAsked | None) -> None:
    if form is not None and tools is not None and tools.callable:
        raise bad_request(
            f'{form.field}: accepted: without tools, or with tool_choice "none"', form.field
        )


def _either(fields: Body, name: str, other: str, words: str) -> int | None:
    """A number that has two names."""
    given: dict[str, int | None] = {each: getattr(fields, each) for each in (name, other)}
    if None not in given.values() and given[name] != given[other]:
        raise bad_request(
            f"{name} = {given[name]}: {other}, {words}, is {given[other]}; accepted: one of them",
            name,
        )
    return given[other] if given[name] is None else given[name]


def _answer_length(fields: Body, limits: RequestLimits, *names: str) -> dict[str, int | None]:
    given = {name: getattr(fields, name) for name in names}
    limits.check_answer(given)
    return given


class _Generating(TypedDict):
    """Fields of GenerateRequest that both kinds of generation read alike."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    truncate_prompt_tokens: int | None
    priority: int
    cache_salt: str | None
    form: AskedForm | None


def _generating(fields: GenerationFields) -> _Generating:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options: accepted: where stream is true", "stream_options")
    if fields.truncate_prompt_tokens == 0:
        raise bad_request(
            "truncate_prompt_tokens = 0: accepted: a whole number from 1 up, or -1",
            "truncate_prompt_tokens",
        )
    options = fields.stream_options or StreamOptions()
    usage = bool(options.include_usage)
    return {
        "stream": bool(fields.stream),
        "include_usage": usage,
        "continuous_usage": usage and bool(options.continuous_usage_stats),
        "return_token_ids": bool(fields.return_token_ids),
        "tokens_as_ids": bool(fields.return_tokens_as_token_ids),
        "truncate_prompt_tokens": fields.truncate_prompt_tokens,
        "priority": fields.priority or 0,
        "cache_salt": fields.cache_salt,
        "form": read_form(cast("FormFields", fields)),
    }


def sampling_params(
    fields: Body, limits: RequestLimits, changes: Mapping[str, object]
) -> SamplingParams:
    """`changes`: what the body has under other names."""
    own = [name for name in SAMPLING if name in fields.__struct_fields__]
    given = {name: value for name in own if (value := getattr(fields, name)) is not None}
    try:
        params = SamplingParams.from_mapping({**limits.default_params, **given, **changes})
        params.check_model(limits.vocab_size, limits.max_logprobs)
    except UsageError as error:
        raise from_usage(error, fields.__struct_fields__) from None
    return params


def _check_sequences(num_prompts: int, n: int, limits: RequestLimits) -> None:
    if num_prompts * n > limits.max_sequences:
        raise bad_request(
            f"{num_prompts} prompts × n = {n}: accepted: up to {limits.max_sequences} sequences in "
            "one request",
            "n" if n > num_prompts else "prompt",
        )


def _prompts(
    prompt: str | list[str | int | list[int]], limits: RequestLimits
) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1:
        raise bad_request(
            "prompt: found an empty list; accepted: at least one token id or one prompt"
            if not prompt
            else "prompt: found a list of different things; accepted: texts alone, token ids "
            "alone, or lists of token ids alone",
            "prompt",
        )
    if kinds == {int}:
        numbers = cast("list[int]", prompt)
        _check_ids("prompt", numbers, limits)
        return (tuple(numbers),)
    if kinds == {str}:
        return tuple(cast("list[str]", prompt))
    lists = cast("list[list[int]]", prompt)
    for i, ids in enumerate(lists):
        if not ids:
            raise bad_request(f"prompt[{i}]: found an empty list; accepted: token ids", "prompt")
        _check_ids(f"prompt[{i}]", ids, limits)
    return tuple(tuple(ids) for ids in lists)


def _check_ids(name: str, ids: Iterable[int], limits: RequestLimits) -> None:
    highest = max(ids, default=0)
    if highest >= limits.vocab_size:
        raise bad_request(
            f"{name} has token {highest}: accepted: ids below {limits.vocab_size}, the size of the "
            "vocabulary",
            name,
        )


def template_arguments(given: JSON | None) -> JSON:
    for name in _OURS:
        if name in (given or {}):
            raise bad_request(
                f"chat_template_kwargs.{name}: accepted: as a field of the request itself",
                f"chat_template_kwargs.{name}",
            )
    return given or {}


def _conversation(fields: Templating, limits: RequestLimits, body: bytes) -> Conversation:
    if fields.chat_template is not None and not limits.request_templates:
        raise bad_request(
            "chat_template: this server renders with its own; --trust-request-chat-template lets "
            "requests bring theirs",
            "chat_template",
        )
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise bad_request(
            "continue_final_message with add_generation_prompt: accepted: one of them",
            "continue_final_message",
        )
    prompted = fields.add_generation_prompt
    return Conversation(
        messages=fields.messages,
        chat_template=fields.chat_template,
        chat_template_kwargs=template_arguments(fields.chat_template_kwargs),
        reasoning_effort=fields.reasoning_effort,
        add_generation_prompt=not continues if prompted is None else prompted,
        continue_final_message=continues,
        tools=read_tools(fields, body),
    )
