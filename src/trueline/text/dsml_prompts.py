"""What the encodings of DeepSeek-V3.2 and V4 share: tools, calls and results in prompts, and how
messages that have them are read.

A result belongs to a call by its id, in whatever order results come; prompts have them in the
order of the calls. Where no result has an id, they are in that order already.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple

from trueline.errors import UsageError, did_you_mean, short_repr
from trueline.spec.source import Fact, Source, default
from trueline.text.formats.dsml import DSML, END_INVOKE, END_PARAMETER, INVOKE, PARAMETER
from trueline.text.formats.values import read_json
from trueline.utils.json_types import JSON, JsonValue

if TYPE_CHECKING:
    from trueline.text.vocabulary import Vocabulary

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
ASKS = ("user", "developer")
BETWEEN = "\n\n"
"""Between the parts of a message."""
RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
SCHEMAS = "tool_schemas"
MEANT = {"dsml_token": DSML, "thinking_start_token": THINK, "thinking_end_token": END_THINK}
"""What the published programs write in the text about tools, and what stands there in prompts."""
FIELDS = {
    "tools": ("system", "developer"),
    "response_format": ("system", "developer"),
    "tool_calls": ("assistant",),
    "tool_call_id": ("tool",),
}
"""By whose messages they are of."""


@dataclass(frozen=True)
class Call:
    id: str | None
    name: str
    arguments: JSON


@dataclass(frozen=True)
class Said:
    """A message."""

    where: str
    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    functions: tuple[JsonValue, ...] = ()
    response_format: JsonValue = None
    call_id: str | None = None
    task: object = None


# -- tools -------------------------------------------------------------------------------------


class ToolsText(NamedTuple):
    """What tells the model of its tools, before and behind their schemas."""

    before: str
    after: str
    name: str = "published"

    def of(self, functions: Iterable[JsonValue]) -> str:
        return self.before + "\n".join(map(to_json, functions)) + self.after


def tools_text(said: Mapping[str, object], file: str, key: str, known: str) -> Fact[ToolsText]:
    """The text under `key` of the checkpoint's program; where it does not say, `known`."""
    text = said.get(key)
    published = ToolsText(*_split(known))
    if not isinstance(text, str):
        return default(published, "no encoder that says otherwise")
    try:
        own = ToolsText(*_split(text))
    except ValueError as error:
        raise UsageError(f"{file}: {key}: {error}") from None
    name = published.name if own == published else "its own"
    return Fact(own._replace(name=name), Source("key", f"{file}: {key}"))


def _split(text: str) -> tuple[str, str]:
    parts = [""]
    for literal, name, form, conversion in Formatter().parse(text):
        parts[-1] += literal
        if name is None:
            continue
        if form or conversion or name not in (*MEANT, SCHEMAS):
            raise ValueError(f"holds {{{name}}}; accepted: {', '.join(sorted({*MEANT, SCHEMAS}))}")
        if name == SCHEMAS:
            parts.append("")
        else:
            parts[-1] += MEANT[name]
    if len(parts) != 2:
        raise ValueError(f"has {{{SCHEMAS}}} {len(parts) - 1} times; accepted: once")
    return parts[0], parts[1]


def to_json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


def calls_text(calls: Iterable[Call], block: str) -> str:
    lines = [f"<{DSML}{block}>"]
    for call in calls:
        lines.append(f'{INVOKE}{call.name}">')
        # one without parameters has an empty line
        lines.append("\n".join(_parameter(name, value) for name, value in call.arguments.items()))
        lines.append(END_INVOKE)
    return "\n".join([*lines, f"</{DSML}{block}>"])


def _parameter(name: str, value: JsonValue) -> str:
    is_text = isinstance(value, str)
    written = value if isinstance(value, str) else to_json(value)
    return f'{PARAMETER}{name}" string="{str(is_text).lower()}">{written}{END_PARAMETER}'


def about(said: Said, tools: ToolsText) -> list[str]:
    """What a message says besides its content."""
    found = [tools.of(said.functions)] if said.functions else []
    if said.response_format:
        found.append(RESPONSE_FORMAT + to_json(said.response_format))
    return found


# -- messages ----------------------------------------------------------------------------------


def read_messages(
    messages: Sequence[JSON],
    tools: object,
    *,
    roles: Collection[str],
    title: str,
    not_rendered: Iterable[str],
) -> list[Said]:
    """As `check_messages` leaves them, with results in the order of their calls. The tools of a
    request are those of the first message, if that is the system's, else of an empty one before."""
    said = [
        _read(f"messages[{i}]", message, roles, title, not_rendered)
        for i, message in enumerate(messages)
    ]
    functions, found = read_functions("tools", tools), _ordered(said)
    if not functions:
        return found
    if found[0].role != "system":
        return [Said("tools", "system", functions=functions), *found]
    if found[0].functions:
        raise UsageError("messages[0].tools: the request has tools itself; accepted: one of them")
    return [replace(found[0], functions=functions), *found[1:]]


def _read(
    where: str, message: JSON, roles: Collection[str], title: str, not_rendered: Iterable[str]
) -> Said:
    role, content = message["role"], message.get("content") or ""
    reasoning = message.get("reasoning_content") or ""
    if role not in roles:
        raise UsageError(
            f"{where}.role = {short_repr(role)}: accepted by {title}'s encoding: "
            f"{', '.join(roles)}{did_you_mean(role, roles)}"
        )
    for name in not_rendered:
        if message.get(name):
            raise UsageError(f"{where}.{name}: not rendered for {title}; accepted: none")
    for name, whose in FIELDS.items():
        if message.get(name) and role not in whose:
            raise UsageError(f"{where}.{name}: of a message whose role is '{role}'; accepted: of "
                             f"{' and '.join(whose)}")  # fmt: skip
    if role == "developer" and not content:
        raise UsageError(f"{where}.content is empty; accepted of a developer: a text")
    if not isinstance(reasoning, str):
        raise UsageError(f"{where}.reasoning_content = {short_repr(reasoning)}: accepted: a text")
    form = message.get("response_format") or None
    if not isinstance(form, Mapping | None):
        raise UsageError(f"{where}.response_format = {short_repr(form)}: accepted: an object")
    call_id = message.get("tool_call_id") or None
    if call_id is not None and not isinstance(call_id, str):
        raise UsageError(f"{where}.tool_call_id = {short_repr(call_id)}: accepted: a text")
    return Said(
        where,
        role,
        content,
        reasoning,
        _calls(f"{where}.tool_calls", message.get("tool_calls")),
        read_functions(f"{where}.tools", message.get("tools")),
        form,
        call_id,
        message.get("task"),
    )


def read_functions(where: str, tools: object) -> tuple[JsonValue, ...]:
    """What a list of tools says of their functions."""
    found = []
    for place, function in _functions(where, tools):
        _text(f"{place}.name", function.get("name"))
        found.append(function)
    return tuple(found)


def _calls(where: str, value: object) -> tuple[Call, ...]:
    found: list[Call] = []
    for place, function in _functions(where, value):
        i = len(found)
        call_id = value[i].get("id") if isinstance(value, list) else None
        if call_id is not None:
            _text(f"{where}[{i}].id", call_id)
        if call_id is not None and any(call.id == call_id for call in found):
            raise UsageError(f"{where}[{i}].id = {short_repr(call_id)}: another call has it")
        name = _text(f"{place}.name", function.get("name"))
        found.append(Call(call_id, name, _arguments(place, function.get("arguments"))))
    return tuple(found)


def _functions(where: str, value: object) -> Iterable[tuple[str, JSON]]:
    if not isinstance(value, list | None):
        raise UsageError(f"{where} = {short_repr(value)}: accepted: a list of objects")
    for i, item in enumerate(value or ()):
        kind = item.get("type", "function") if isinstance(item, Mapping) else None
        function = item.get("function") if isinstance(item, Mapping) else None
        if kind != "function" or not isinstance(function, Mapping):
            raise UsageError(
                f"{where}[{i}] = {short_repr(item)}: accepted: an object whose type is 'function', "
                "with a function"
            )
        yield f"{where}[{i}].function", dict(function)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where} = {short_repr(value)}: accepted: a text that is not empty")
    return value


def _arguments(where: str, value: object) -> JSON:
    """An object, or one as JSON text; clients write nothing, or an empty text, for none."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    found = read_json(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{where}.arguments = {short_repr(value)}: accepted: a JSON object, or the text of one"
        )
    return dict(found)


# -- results -----------------------------------------------------------------------------------


def _ordered(said: Sequence[Said]) -> list[Said]:
    found: list[Said] = []
    place = 0
    while place < len(said):
        caller = said[place]
        if caller.role == "tool":
            raise UsageError(
                f"{caller.where}.role = 'tool': no call waits for a result; accepted: behind an "
                "assistant's message with tool_calls, one for each of them"
            )
        end = place + 1
        while end < len(said) and said[end].role == "tool":
            end += 1
        results = said[place + 1 : end]
        found += [caller, *_results(caller, results, last=end == len(said))]
        # without calls, results are met as messages by themselves
        place = end if caller.calls else place + 1
    return found


def _results(caller: Said, results: Sequence[Said], *, last: bool) -> list[Said]:
    if not caller.calls or (last and not results):
        return []
    if not any(result.call_id for result in results):
        answers = dict(enumerate(results))
    else:
        answers = _by_id(caller, results)
    for i in range(len(caller.calls)):
        if i not in answers:
            raise UsageError(
                f"{caller.where}.tool_calls[{i}] ({caller.calls[i].name}) has no result; accepted: "
                "a message of the role tool for each call, before any other message"
            )
    if len(results) > len(caller.calls):
        raise UsageError(
            f"{results[len(caller.calls)].where}: {caller.where} has {len(caller.calls)} calls, "
            "and as many results before this; accepted: one for each call"
        )
    return [answers[i] for i in range(len(caller.calls))]


def _by_id(caller: Said, results: Sequence[Said]) -> dict[int, Said]:
    places = {call.id: i for i, call in enumerate(caller.calls) if call.id is not None}
    found: dict[int, Said] = {}
    for result in results:
        what = f"{result.where}.tool_call_id"
        if result.call_id not in places:
            given = "is missing" if result.call_id is None else f"= {short_repr(result.call_id)}"
            accepted = ", ".join(map(short_repr, places)) or "none, as its calls have none"
            raise UsageError(f"{what} {given}: accepted: an id of {caller.where}.tool_calls "
                             f"({accepted})")  # fmt: skip
        place = places[result.call_id]
        if place in found:
            raise UsageError(f"{what} = {short_repr(result.call_id)}: {found[place].where} has its "
                             "result; accepted: one for each call")  # fmt: skip
        found[place] = result
    return found


# -- tokens ------------------------------------------------------------------------------------


def check_tokens(needed: Collection[str], vocabulary: Vocabulary, title: str) -> None:
    """Text that only looks like a token means nothing to the model."""
    missing = sorted(name for name in needed if vocabulary.token_id(name) is None)
    if missing:
        raise UsageError(
            f"chat: {title}'s encoding needs {', '.join(missing)}, which this vocabulary does not "
            "have; accepted: a chat_template, or a prompt instead of messages"
        )
