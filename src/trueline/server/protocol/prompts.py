"""Tokenizes the prompts of a request; the responses of /tokenize and /detokenize."""

from __future__ import annotations

import msgspec

from trueline.errors import UsageError
from trueline.output_processor import read_prompt
from trueline.server.protocol.errors import ApiError, bad_request, from_usage
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.messages_api.objects import CountedTokens
from trueline.server.protocol.raw_json import in_pieces
from trueline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from trueline.server.protocol.responses import Detokenized, Tokenized, TokenizerInfo
from trueline.text.call_arguments import check_calls, with_arguments
from trueline.text.chat import (
    check_messages,
    render_as_read,
    render_chat,
    template_and_values,
)
from trueline.text.encoding_arguments import EFFORT
from trueline.text.switches import KWARGS, switched, with_thinking
from trueline.text.template_process import TemplateProcess
from trueline.text.tokenizer import Tokenizer
from trueline.utils.json_types import JSON

_HERE = "\u2063the-answer-goes-on-here\u2063"
"""Put at the end of a message to see where its template leaves it; invisible separators make it
unlike any message."""


def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, limits: RequestLimits
) -> list[tuple[str | None, list[int]]]:
    """For each prompt its text, where that is what was given, and its tokens."""
    found = []
    for i, prompt in enumerate(request.prompts):
        name = "prompt" if len(request.prompts) == 1 else f"prompt[{i}]"
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if isinstance(prompt, str):
            _check_least(name, tokenizer.least_tokens(prompt), request, limits)
        elif request.truncate_prompt_tokens is None:
            limits.check_length(name, len(prompt))
        try:
            text, ids = read_prompt(given, tokenizer, limits.vocab_size)
        except UsageError as error:
            raise bad_request(f"{name}: {error}", name) from None
        text, ids = _truncated(text, ids, request, limits)
        limits.check_length(name, len(ids), request.answer_length)
        found.append((text, ids))
    num_tokens = sum(len(ids) for _, ids in found)
    limits.check_prompts(num_tokens, request.params.n, request.scores_per_prompt_token)
    return found


def chat_prompt(
    request: ChatRequest,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    templates: TemplateProcess | None = None,
) -> tuple[str | None, list[int]]:
    """The text that the template makes of the messages, and its tokens. `templates` renders those
    that requests bring."""
    rendered = _render(request.conversation, tokenizer, templates)
    _check_least("messages", tokenizer.least_tokens(rendered), request, limits)
    # the template writes its own special tokens
    encoded = _encode("messages", rendered, tokenizer, add_special_tokens=False)
    if not encoded:
        raise bad_request("messages: the template makes an empty prompt of them", "messages")
    text, ids = _truncated(rendered, encoded, request, limits)
    limits.check_length("messages", len(ids), request.answer_length)
    limits.check_prompts(len(ids), request.params.n, request.scores_per_prompt_token)
    return text, ids


def _check_least(name: str, least: int, request: GenerateRequest, limits: RequestLimits) -> None:
    """Of a text that is not yet encoded: one that is to be truncated need not fit the model."""
    if request.truncate_prompt_tokens is None:
        limits.check_length(name, least, least=True)
    else:
        limits.check_tokens(name, least)


def _truncated(
    text: str | None, ids: list[int], request: GenerateRequest, limits: RequestLimits
) -> tuple[str | None, list[int]]:
    """Without its beginning, as far as the request says; its text is then not known."""
    most = request.truncate_prompt_tokens
    if most is None:
        return text, ids
    if most == -1:
        most = max(limits.max_model_len - (request.params.max_tokens or 1), 1)
    return (text, ids) if len(ids) <= most else (None, ids[-most:])


def count_tokens(request: TokenizeRequest, tokenizer: Tokenizer, limits: RequestLimits) -> bytes:
    """As Anthropic's clients ask for it."""
    counted = msgspec.json.decode(tokenize(request, tokenizer, limits), type=Tokenized).count
    return msgspec.json.encode(CountedTokens(counted))


def tokenize(
    request: TokenizeRequest,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    templates: TemplateProcess | None = None,
) -> bytes:
    if isinstance(request.text, Conversation):
        name, text = "messages", _render(request.text, tokenizer, templates)
    else:
        name, text = "prompt", request.text
    limits.check_tokens(name, tokenizer.least_tokens(text))
    ids = _encode(name, text, tokenizer, request.add_special_tokens)
    limits.check_tokens(name, len(ids))
    names = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    shown = None if names is None else in_pieces(names)
    return msgspec.json.encode(Tokenized(len(ids), limits.max_model_len, in_pieces(ids), shown))


def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer) -> bytes:
    return msgspec.json.encode(Detokenized(tokenizer.decode(request.tokens, False)))


def tokenizer_info(tokenizer: Tokenizer, limits: RequestLimits) -> bytes:
    named, templates = tokenizer.special_tokens, tokenizer.chat_templates
    return msgspec.json.encode(
        TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            model_max_length=limits.max_model_len,
            chat_template=templates.get("default"),
            **{name: named.get(name) for name in ("bos_token", "eos_token", "pad_token")},
        )
    )


def _encode(name: str, text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens)
    except UsageError as error:
        raise bad_request(f"{name}: {error}", name) from None


def _render(asked: Conversation, tokenizer: Tokenizer, templates: TemplateProcess | None) -> str:
    messages = asked.messages
    if asked.continue_final_message:
        messages = [*messages[:-1], _marked(len(messages) - 1, messages[-1])]
    arguments, prompted = asked.chat_template_kwargs, asked.add_generation_prompt
    tools = asked.tools.shown if asked.tools is not None else None
    try:
        if asked.chat_template is None:
            effort, has_tools = asked.reasoning_effort, bool(tools)
            if asked.thinking is not None:
                arguments = with_thinking(
                    tokenizer, arguments, asked.thinking, with_tools=has_tools
                )
            arguments = switched(tokenizer, arguments, effort, with_tools=has_tools)
            if tokenizer.chat_encoding is not None:
                messages = with_arguments(check_calls(messages), "object")
                text = render_chat(tokenizer, messages, prompted, tools, **arguments)
            else:
                values = template_and_values(tokenizer, messages, prompted, tools, **arguments)
                text = render_as_read(*values)
        else:
            assert templates is not None, "never in this process: it knows no end"
            effort = asked.reasoning_effort
            own = {} if effort is None else {"reasoning_effort": effort}
            arguments = {**tokenizer.special_tokens, **own, **arguments}
            values = template_and_values(
                asked.chat_template, messages, prompted, tools, **arguments
            )
            text = render_as_read(*values, templates.render)
    except UsageError as error:
        raise _about_messages(error, asked) from None
    except RecursionError:
        raise bad_request("messages: nested too deep", "messages") from None
    if not asked.continue_final_message:
        return text
    before, found, _ = text.rpartition(_HERE)
    if not found:
        raise bad_request(
            "continue_final_message: the chat template does not show the last message",
            "continue_final_message",
        )
    return before


def _about_messages(error: UsageError, asked: Conversation) -> ApiError:
    told = str(error)
    if asked.reasoning_effort is not None and told.startswith(f"{KWARGS}.{EFFORT}"):
        error = UsageError(told.removeprefix(f"{KWARGS}."))  # as the request has it
    found = from_usage(error, ("messages", "tools", "chat_template_kwargs", "reasoning_effort"))
    return bad_request(found.message, found.param or "messages")


def begun(asked: Conversation) -> str:
    """The beginning of the answer, which the prompt ends with."""
    if not asked.continue_final_message:
        return ""
    return str(check_messages(asked.messages[-1:])[0]["content"])


def _marked(place: int, message: JSON) -> JSON:
    content = message.get("content")
    if isinstance(content, list) and content:
        last = content[-1]
        text = last.get("text") if isinstance(last, dict) else last
        if isinstance(text, str):
            marked = {"type": "text", "text": text + _HERE}
            return {**message, "content": [*content[:-1], marked]}
    elif isinstance(content, str):
        return {**message, "content": content + _HERE}
    raise bad_request(
        f"messages[{place}].content: accepted: a text to go on from", f"messages[{place}].content"
    )
