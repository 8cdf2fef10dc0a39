"""Chat templates: messages to the text that a model was trained on.

Templates are written for Hugging Face transformers; the environment here is the one they rely on.
They are code of strangers: they run in a sandbox, on copies of the data made of plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trueline.errors import UsageError
from trueline.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

TEXT_JOINER = "\n"
"""Between the text parts of one message."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that an assistant's reasoning goes by. Templates read the first, or the second."""


def render_chat(
    tokenizer_or_template: Tokenizer | str,
    messages: Sequence[Message],
    /,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The prompt for these messages; `kwargs` are the template's own (enable_thinking, …) and win
    over the special tokens of the same name. Encode the result without special tokens."""
    checked = check_messages(messages)
    if isinstance(tokenizer_or_template, Tokenizer):
        template = tokenizer_or_template.chat_template(with_tools=bool(tools))
        special = tokenizer_or_template.special_tokens
        sort = tokenizer_or_template.sorts_tools
    else:
        template, special, sort = tokenizer_or_template, {}, False
    values: dict[str, Any] = {
        **special,
        "documents": None,
        **{name: _plain(name, value) for name, value in kwargs.items()},
        "messages": checked,
        "tools": _check_tools(tools, sort),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render(values)
    except TemplateSyntaxError as error:
        raise UsageError(f"chat template, line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise UsageError(f"chat template does what it must not: {error}") from error
    except _Refused as error:
        raise UsageError(f"chat template refuses these messages: {error.message}") from error
    except Exception as error:  # a template can raise anything that an expression can
        raise UsageError(f"chat template failed: {type(error).__name__}: {error}") from error


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with text parts joined. Roles are the template's business."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UsageError(
            f"messages = {_short(messages)}: accepted: a list of at least one message, as "
            "{'role': 'user', 'content': 'hello'}"
        )
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} = {_short(message)}: accepted: an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"{where}.role = {_short(role)}: accepted: a name as 'user'")
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        message = {**message, "content": TEXT_JOINER.join(parts)}
    elif content is None:
        if role != "assistant":  # who may have called tools and said nothing
            raise UsageError(f"{where}.content is missing; accepted: a text, also an empty one")
    elif not isinstance(content, str):
        raise UsageError(
            f"{where}.content = {_short(content)}: accepted: a text, or a list of text parts"
        )
    return _with_reasoning({key: _plain(f"{where}.{key}", message[key]) for key in message})


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is not None and kind != "text":
        raise UsageError(f"{where}: type '{kind}' is not supported; accepted: text")
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise UsageError(
            f"{where} = {_short(part)}: accepted: a part as {{'type': 'text', 'text': 'hello'}}"
        )
    return text


def _check_tools(tools: object, sort: bool) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise UsageError(f"tools = {_short(tools)}: accepted: a list of objects")
    plain = [_plain(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    return [_sorted(tool) for tool in plain] if sort else plain


def _plain(where: str, value: object) -> Any:
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


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Refused(TemplateError):
    """The template called raise_exception: its author's words for its user."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class _Namespace(Namespace):
    """Jinja's, without names that reach Python's own attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute '{name}' begins with an underscore")
        super().__setitem__(name, value)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Not the class: dict.update(…) would change what the sandbox holds unchangeable."""
    return dict(*args, **kwargs)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write < as \\u003c, for the web."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training. Its body has a scope of its
    own, as there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _make_dict
    return environment


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)
