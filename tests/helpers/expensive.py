"""Requests that are made to cost much, from the structs that read bodies: a field that can be made
long is made so, at its limit and far beyond it. One that has no limit is an error here, unless
`UNBOUNDED` knows what bounds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from trueline.server.protocol import bodies
from trueline.server.protocol.limits import (
    MAX_DIGITS,
    MAX_FRACTIONS,
    MAX_ITEMS,
    MAX_NESTED,
    MAX_TOOLS_BYTES,
    MAX_VALUES,
)
from trueline.server.protocol.messages_api.bodies import (
    CountTokensBody,
    InputTool,
    MessagesBody,
)
from trueline.server.protocol.responses_api.bodies import FunctionTool, ResponsesBody
from trueline.server.protocol.tools import ToolFields
from trueline.text.call_arguments import MAX_ARGUMENTS

MAX_LEN, VOCAB = 2048, 2048
"""Of the model that is served: short, so that its own work is."""
FAR = 1 << 20
"""About the bytes of what is far beyond a limit."""
ROUTES: dict[str, Any] = {
    "/v1/completions": bodies.CompletionBody,
    "/v1/chat/completions": bodies.ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": bodies.TokenizePromptBody,
    "/detokenize": bodies.DetokenizeBody,
}
TOKENIZE_CHAT = bodies.TokenizeChatBody
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0,
    },
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "temperature": 0},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}  # fmt: skip
UNBOUNDED = {"prompt", "tokens", "messages", "guided_json", *bodies.Ignored.__struct_fields__,
             "input", "instructions", "system", "cache_control"}  # fmt: skip
"""By themselves: their values are counted with the body's, their tokens by the model's length."""


LANGUAGES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Texts with a syntax, and a limit of all their bytes: they are read, and may be refused."""


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Callable[[float], bytes]
    """At this part of the limit; beyond 1, of what is refused."""
    beyond: bool = False
    says: tuple[str, ...] = ()
    """What the refusal has to say."""
    fills: bool = True
    """Whether a quarter of it is a quarter as long."""


def cases() -> Iterator[Case]:
    """Of single fields, then of all together, then of bodies as such."""
    known = []
    for path, body in ROUTES.items():
        for field in msgspec.structs.fields(body):
            if (field.name, field.type) not in known:
                known.append((field.name, field.type))
                yield from field_cases(path, field.name, field.type)
    yield from _together()
    yield from _shapes()


def field_cases(path: str, name: str, kind: Any) -> Iterator[Case]:
    long = [found for found in _parts(inspect.type_info(kind)) if _is_long(found)]
    for part in long:
        limit = _limit(part)
        if limit is None:
            assert name in UNBOUNDED, f"{name} of {path} can be made long and has no limit"
            continue
        label = f"{path} {name} {type(part).__name__.removesuffix('Type').lower()}"
        if limit:
            yield Case(label, path, _bodies(path, name, part, limit))
        far = max(FAR // len(json.dumps(_value(part, 1))), 2 * limit)
        beyond = _bodies(path, name, part, far)
        offered = name not in ROUTES[path].not_offered
        says = (name, str(limit), str(far)) if limit and offered else (name,)
        yield Case(f"{label}, far beyond", path, beyond, True, says)
    if not long and isinstance(inspect.type_info(kind), inspect.AnyType):
        assert name in UNBOUNDED, f"{name} of {path} takes anything and has no limit"


def _bodies(path: str, name: str, part: Any, count: int) -> Callable[[float], bytes]:
    def make(share: float) -> bytes:
        value = _value(part, max(int(count * share), 1))
        return json.dumps(BASES[path] | {name: value}).encode()

    return make


def _parts(kind: Any) -> Iterator[Any]:
    """The kinds that a value may have."""
    if isinstance(kind, inspect.Metadata):
        yield from _parts(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _parts(each)
    else:
        yield kind


def _is_long(kind: Any) -> bool:
    return isinstance(kind, inspect.StrType | inspect.ListType | inspect.DictType)


def _limit(kind: Any) -> int | None:
    found: int | None = kind.max_length
    return found


def _value(kind: Any, count: int) -> Any:
    """With so many entries, each as long as it may be."""
    (kind,) = list(_parts(kind))[:1]
    match kind:
        case inspect.StrType():
            return "ab" * (count // 2) + "a" * (count % 2)
        case inspect.ListType():
            return [_item(kind.item_type, i) for i in range(count)]
        case inspect.DictType():
            named = isinstance(next(_parts(kind.key_type)), inspect.StrType)
            return {f"k{i}" if named else str(i): 1 for i in range(count)}
    raise TypeError(f"{kind} cannot be made long")


def _item(kind: Any, i: int) -> Any:
    (part,) = list(_parts(kind))[:1]
    if isinstance(part, inspect.StrType):
        length = _limit(part) or 1
        return (f"{i:x}." + "ab" * length)[:length]
    if isinstance(part, inspect.DictType):
        return {"role": "user", "content": "a"}
    if isinstance(part, inspect.StructType):
        return _STRUCTS[part.cls](i)
    if isinstance(part, inspect.LiteralType):
        return part.values[0]
    return i % VOCAB


def _tool(i: int, members: int = 1) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", "description": TEXT} for i in range(members)}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}


_STRUCTS: dict[type, Callable[[int], dict[str, Any]]] = {
    ToolFields: _tool,
    FunctionTool: lambda i: {"type": "function"} | _tool(i)["function"],
    InputTool: lambda i: {"name": f"f{i}", "input_schema": _tool(i)["function"]["parameters"]},
}
"""What stands in lists."""
TEXT = "true to the line. "


def _together() -> Iterator[Case]:
    """What has no limit of its own, and what grows as a product."""
    full = MAX_LEN - 2

    def ids(share: float) -> list[int]:
        return [i % 200 for i in range(int(full * share))]

    def text(share: float) -> str:
        return (TEXT * MAX_LEN)[: int(full * share)]

    def case(name: str, path: str, fields: Callable[[float], dict[str, Any]], **more: Any) -> Case:
        return Case(
            name, path, lambda share: json.dumps(BASES[path] | fields(share)).encode(), **more
        )

    completions, chat = "/v1/completions", "/v1/chat/completions"
    yield case("a text as long as the model", completions, lambda s: {"prompt": text(s)})
    yield case("ids as long as the model", completions, lambda s: {"prompt": ids(s)})
    yield case(
        "a message as long as the model",
        chat,
        lambda s: {"messages": [{"role": "user", "content": text(s * 0.9)}]},
    )
    yield case(
        "parts of a message",
        chat,
        lambda s: {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}] * int(full * s / 3)}
            ]
        },
    )
    yield case(
        "a template",
        chat,
        lambda s: {"chat_template": "{{ messages }}" + "{%if a%}b{%endif%}" * int(1130 * s)},
    )
    yield case(
        "prompt logprobs",
        completions,
        lambda s: {"prompt": ids(s), "prompt_logprobs": 20, "echo": True, "logprobs": 20},
    )
    yield case(
        "return_token_ids",
        completions,
        lambda s: {"prompt": ids(s), "return_token_ids": True, "echo": True},
    )
    yield case("prompts", completions, lambda s: {"prompt": ["ab"] * int(64 * s)})
    yield case(
        "n",
        completions,
        lambda s: {"prompt": ids(1), "n": int(64 * s), "temperature": 1},
        fills=False,
    )
    yield from _of_tools(case, chat)
    everything = {
        "stop": [f"{i:02}" + "x" * 250 for i in range(64)],
        "stop_token_ids": list(range(1024)),
        "logit_bias": {str(i): 1 for i in range(1024)},
        "bad_words": [f"{i:04}" + "x" * 9 for i in range(1024)],
        "min_tokens": 1,
    }
    yield case(
        "all lists at once, and n",
        completions,
        lambda s: everything | {"n": max(int(8 * s), 1), "temperature": 1},
        fills=False,
    )
    # 13 bytes are a token at most
    yield case(
        "a text that cannot fit",
        completions,
        lambda s: {"prompt": TEXT * 60_000},
        beyond=True,
        says=("prompt", str(MAX_LEN - 1)),
    )
    yield case(
        "a message that cannot fit",
        chat,
        lambda s: {"messages": [{"role": "user", "content": TEXT * 60_000}]},
        beyond=True,
        says=("messages", str(MAX_LEN - 1)),
    )
    yield case(
        "/tokenize, a long text",
        "/tokenize",
        lambda s: {"prompt": TEXT * int(20_000 * s), "return_token_strs": True},
    )
    yield case(
        "/detokenize, many tokens",
        "/detokenize",
        lambda s: {"tokens": [i % 200 for i in range(int(300_000 * s))]},
    )


def _of_tools(case: Callable[..., Case], chat: str) -> Iterator[Case]:
    """Tools as large as they may be, of strict functions, and calls in the history. What is shown
    of them has to fit the model, which is short."""
    shows = {"chat_template": "{% for m in messages %}{{ m.tool_calls }}{% endfor %}{{ tools }}",
             "truncate_prompt_tokens": 64}  # fmt: skip
    members = MAX_TOOLS_BYTES // MAX_ITEMS["tools"] // 60

    def tools(share: float) -> dict[str, Any]:
        return shows | {"tools": [_tool(i, int(members * share)) for i in range(128)]}

    def calls(count: float) -> dict[str, Any]:
        arguments = '{"a":[' + "1," * int(count / 2) + "1]}"
        call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "tool_calls": [call]}
        return shows | {"messages": [{"role": "user", "content": "a"}, said]}

    yield case("tools", chat, tools)
    yield case("tools, far beyond", chat, lambda s: tools(3), beyond=True,
               says=("tools", str(MAX_TOOLS_BYTES)))  # fmt: skip
    yield case("required", chat, lambda s: tools(s / 4) | {"tool_choice": "required"})
    yield case("arguments", chat, lambda s: calls((MAX_ARGUMENTS - 10) * s))
    yield case("arguments, far beyond", chat, lambda s: calls(2 * MAX_ARGUMENTS), beyond=True,
               says=("arguments", str(MAX_ARGUMENTS)))  # fmt: skip


def _shapes() -> Iterator[Case]:
    """Bodies as such: as much as may be of what costs most to read, in a field that is ignored."""
    path = "/v1/completions"

    def case(name: str, piece: str, most: int, says: str) -> Iterator[Case]:
        def make(count: int) -> bytes:
            inside = ",".join([piece] * count)
            return f'{{"prompt":"a","max_tokens":1,"temperature":0,"user":[{inside}]}}'.encode()

        yield Case(name, path, lambda share: make(int((most - 20) * share)))
        far = max(most + 1, FAR // (len(piece) + 1))
        yield Case(f"{name}, far beyond", path, lambda share: make(far), True, (says, str(most)))

    yield from case("values", "123456", MAX_VALUES, "values")
    yield from case("texts", '"a"', MAX_VALUES, "values")
    yield from case("lists", "[]", MAX_NESTED, "lists and objects")
    yield from case("objects", '{"a":1}', MAX_NESTED, "lists and objects")
    yield from case("fractions", "1.2345678901234567e-300", MAX_FRACTIONS, "fraction")
    digits = b'{"prompt":"a","user":[' + b",".join([b"9" * 4000] * 256) + b"]}"
    yield Case("long numbers", path, lambda s: digits, True, ("number", str(MAX_DIGITS)))
    unknown = b'{"prompt":"a","' + b"x" * FAR + b'":1}'
    yield Case("a long unknown name", path, lambda s: unknown, True, ("is not known",))
    escapes = b'{"prompt":"' + b"\\n" * (FAR // 2)
    yield Case("broken JSON", path, lambda s: escapes, True, ("not JSON",))


def huge() -> Iterator[Case]:
    """Bodies as large as the server takes."""
    most = (16 << 20) - 1000
    path, ignored = "/v1/completions", b'{"prompt":"a","max_tokens":1,"user":'

    def case(name: str, body: bytes, *says: str, path: str = path) -> Case:
        return Case(name, path, lambda share: body, bool(says), says, fills=False)

    yield case("a text", ignored + b'"' + b"a" * most + b'"}')
    yield case("escapes", ignored + b'"' + b"\\n" * (most // 2) + b'"}')
    yield case("backslashes", ignored + b'"' + b"\\" * (most // 2 * 2) + b'"}')
    yield case("quotation marks", ignored + b'"' + b'\\"' * (most // 2) + b'"}')
    yield case("white space", ignored + b" " * most + b"1}")
    yield case("commas in a text", ignored + b'"' + b",[{" * (most // 3) + b'"}')
    yield case("no text at all", b'"' * most, "a JSON object")
    yield case("digits", ignored + b"1" * most + b"}", "number")
    yield case("a prompt", b'{"prompt":"' + b"a" * most + b'"}', "prompt")
    yield case("ids", b'{"prompt":[' + b"1," * (most // 2) + b"1]}", "values")
    yield case("a name", b'{"prompt":"a","' + b"n" * most + b'":1}', "is not known")
    yield case("a text of too many tokens", b'{"prompt":"' + b"a" * (6 << 20) + b'"}', "prompt",
               path="/tokenize")  # fmt: skip
