"""Chats: messages to the text that a model was trained on, by its template or its encoding.

Templates are untrusted code: they get copies of the data made of plain JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from trueline.errors import UsageError, short, short_repr
from trueline.text import kimi_tools
from trueline.text.call_arguments import (
    Form,
    Render,
    check_calls,
    form_of,
    has_calls,
    with_arguments,
)
from trueline.text.templates import names_read, render_template
from trueline.text.tokenizer import Tokenizer
from trueline.utils.json_types import JSON, JsonValue

Message = Mapping[str, object]

TEXT_JOINER = "\n"
"""Between the text parts of one message."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that an assistant's reasoning goes by. Templates read the first, or the second."""

PROBE: JSON = {"bos_token": "", "eos_token": "", "documents": None, "tools": None}
"""What a template is given besides messages, to see what it makes of calls."""


def render_chat(
    tokenizer_or_template: Tokenizer | str,
    messages: Sequence[Message],
    /,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    **kwargs: object,
) -> str:
    """The prompt for these messages; `kwargs` are the template's own (enable_thinking, …) and win
    over the special tokens of the same name. Encode the result without special tokens."""
    if isinstance(tokenizer_or_template, Tokenizer):
        encoding = tokenizer_or_template.chat_encoding
        if encoding is not None:
            checked, offered = check_messages(messages), _check_tools(tools, sort=False)
            return encoding.render(checked, add_generation_prompt, offered, kwargs)
    return render_template(
        *template_and_values(
            tokenizer_or_template, messages, add_generation_prompt, tools, **kwargs
        )
    )


def render_as_read(template: str, values: JSON, render: Render = render_template) -> str:
    """`values`, as `template_and_values` gives them, with arguments of calls as this template takes
    them. UsageError where it does not show tools or calls that are there."""
    messages = check_calls(values["messages"])
    if values["tools"] and not names_read(template) & {"tools", kimi_tools.ARGUMENT}:
        raise UsageError(
            "tools: this model's chat template shows none; accepted: without them, or a template "
            "that reads `tools`"
        )
    if has_calls(messages):
        form = _form_of(template) if render is render_template else form_of(template, PROBE, render)
        if form == "hidden":
            place = next(i for i, message in enumerate(messages) if message.get("tool_calls"))
            raise UsageError(
                f"messages[{place}].tool_calls: this model's chat template shows no calls; "
                "accepted: without them"
            )
        messages = with_arguments(messages, form)
    return render(template, values | {"messages": messages})


@lru_cache(maxsize=64)
def _form_of(template: str) -> Form:
    return form_of(template, PROBE, render_template)


def template_and_values(
    tokenizer_or_template: Tokenizer | str,
    messages: Sequence[Message],
    /,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    **kwargs: object,
) -> tuple[str, JSON]:
    """What `render_chat` renders, all of it plain JSON."""
    checked = check_messages(messages)
    if isinstance(tokenizer_or_template, Tokenizer):
        template = tokenizer_or_template.chat_template(with_tools=bool(tools))
        special = tokenizer_or_template.special_tokens
        sort = tokenizer_or_template.sorts_tools
    else:
        template, special, sort = tokenizer_or_template, {}, False
    declares = kimi_tools.ARGUMENT in template
    offered = _check_tools(tools, sort or declares)
    return template, {
        **(_of_kimi(offered) if declares else {}),
        **special,
        "documents": None,
        **{name: _plain(name, value) for name, value in kwargs.items()},
        "messages": checked,
        "tools": offered,
        "add_generation_prompt": add_generation_prompt,
    }


def _of_kimi(tools: list[JsonValue] | None) -> JSON:
    """What Kimi-K2.5's own tokenizer gives its template, besides what every template gets."""
    declared = kimi_tools.declare(tools) if tools else None
    return {"thinking": True} | ({} if declared is None else {kimi_tools.ARGUMENT: declared})


def check_messages(messages: Sequence[Message]) -> list[JSON]:
    """The messages with text parts joined. Roles are the template's business."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UsageError(
            f"messages = {short_repr(messages)}: accepted: a list of at least one message, as "
            "{'role': 'user', 'content': 'hello'}"
        )
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: object) -> JSON:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{where} = {short_repr(message)}: accepted: an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}.role = {short_repr(role)}: accepted: a name as 'user'")
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        message = {**message, "content": TEXT_JOINER.join(parts)}
    elif content is None:
        if role != "assistant":  # who may have called tools and said nothing
            raise UsageError(f"{where}.content is missing; accepted: a text, also an empty one")
    elif not isinstance(content, str):
        raise UsageError(
            f"{where}.content = {short_repr(content)}: accepted: a text, or a list of text parts"
        )
    plain = {key: _plain(f"{where}.{key}", message[key]) for key in message}
    return _with_reasoning(plain)


def _with_reasoning(message: JSON) -> JSON:
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is not None and kind != "text":
        raise UsageError(f"{where}: type '{short(str(kind))}' is not supported; accepted: text")
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise UsageError(
            f"{where} = {short_repr(part)}: accepted: a part as {{'type': 'text', 'text': 'hello'}}"
        )
    return text


def _check_tools(tools: object, sort: bool) -> list[JsonValue] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise UsageError(f"tools = {short_repr(tools)}: accepted: a list of objects")
    plain = [_plain(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    return [_sorted(tool) for tool in plain] if sort else plain


def _plain(where: str, value: object) -> JsonValue:
    """A copy made of what JSON has: other objects have methods that no sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{i}]", item) for i, item in enumerate(value)]
    raise UsageError(
        f"{where} is a {type(value).__name__}; accepted: texts, numbers, true, false, null, and "
        "lists and objects of them"
    )


def _sorted(value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
