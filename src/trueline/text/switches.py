"""Whether a model is to think, and how much: asked of its template or its encoding, by the name
that it has for it. What has no such switch cannot do as it is told, and says so."""

from __future__ import annotations

from collections.abc import Collection

from trueline.errors import UsageError, short_repr
from trueline.text.encoding_arguments import EFFORT, NO_EFFORT, SWITCHES
from trueline.text.templates import names_read
from trueline.text.tokenizer import Tokenizer
from trueline.utils.json_types import JSON

KWARGS = "chat_template_kwargs"


def switched(
    tokenizer: Tokenizer, arguments: JSON, effort: str | None, *, with_tools: bool = False
) -> JSON:
    """`arguments` of a request and its `reasoning_effort`, as what renders it has them."""
    reads = _reads(tokenizer, with_tools)
    found = _with_effort(arguments, effort, reads)
    if tokenizer.chat_encoding is not None:  # which refuses by itself what it does not know
        return found
    if found.get(EFFORT) is not None and EFFORT not in reads:
        raise UsageError(_no_effort(f"{KWARGS}.{EFFORT}", found[EFFORT], reads))
    for name in SWITCHES:
        if name in found and name not in reads:
            found = _renamed(found, name, reads)
    return found


def _reads(tokenizer: Tokenizer, with_tools: bool) -> Collection[str]:
    encoding = tokenizer.chat_encoding
    if encoding is not None:
        return encoding.reads
    return names_read(tokenizer.chat_template(with_tools=with_tools))


def with_thinking(
    tokenizer: Tokenizer, arguments: JSON, thinking: bool, *, with_tools: bool = False
) -> JSON:
    """`arguments` with the switch for thinking; as they are, where there is none."""
    reads = _reads(tokenizer, with_tools)
    switch = next((name for name in SWITCHES if name in reads), None)
    if switch is None:
        return arguments
    for name in SWITCHES:
        if arguments.get(name, thinking) != thinking:
            raise UsageError(f"{KWARGS}.{name}: thinking says otherwise; accepted: one of them")
    return {**arguments, switch: thinking}


def _with_effort(arguments: JSON, effort: str | None, reads: Collection[str]) -> JSON:
    if effort is None:
        return arguments
    if arguments.get(EFFORT, effort) != effort:
        raise UsageError(
            f"{EFFORT} = {short_repr(effort)}: {KWARGS}.{EFFORT} is "
            f"{short_repr(arguments[EFFORT])}; accepted: one of them"
        )
    switch = next((name for name in SWITCHES if name in reads), None)
    if effort != NO_EFFORT or switch is None:
        if EFFORT not in reads:
            raise UsageError(_no_effort(EFFORT, effort, reads))
        return {**arguments, EFFORT: effort}
    for name in SWITCHES:
        if arguments.get(name):
            raise UsageError(f"{EFFORT} = 'none': {KWARGS}.{name} is true; accepted: one of them")
    rest = {name: value for name, value in arguments.items() if name not in (*SWITCHES, EFFORT)}
    return {**rest, switch: False}


def _no_effort(name: str, effort: object, reads: Collection[str]) -> str:
    accepted = f"null, or '{NO_EFFORT}'" if any(each in reads for each in SWITCHES) else "null"
    return (
        f"{name} = {short_repr(effort)}: this model's chat template has no efforts; "
        f"accepted: {accepted}"
    )


def _renamed(arguments: JSON, name: str, reads: Collection[str]) -> JSON:
    """The template has the switch under the other name, or not at all."""
    (other,) = (each for each in SWITCHES if each != name)
    value = arguments[name]
    rest = {each: arguments[each] for each in arguments if each != name}
    if value is None:
        return rest
    if other not in reads:
        raise UsageError(
            f"{KWARGS}.{name}: this model's chat template has no switch for thinking; accepted: "
            "without it"
        )
    if rest.get(other, value) != value:
        raise UsageError(f"{KWARGS}.{name}: {KWARGS}.{other} says otherwise; accepted: one of them")
    return {**rest, other: value}
