"""Which format a checkpoint's answers have: read off its own files, or named by the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from trueline.errors import UsageError, did_you_mean, short
from trueline.spec.source import Fact, Source, default
from trueline.text.formats.calls import CallSyntax
from trueline.text.formats.deepseek_v3 import SEPARATOR, DeepSeekV3Calls
from trueline.text.formats.dsml import DSML, DsmlCalls
from trueline.text.formats.glm import KEY, VALUE, GlmCalls
from trueline.text.formats.hermes import CALL, HermesCalls
from trueline.text.formats.kimi_k2 import SECTION, KimiK2Calls
from trueline.text.formats.parser import ChatFormat, ReasoningSyntax

CALLS: Mapping[str, CallSyntax] = {
    syntax.name: syntax
    for syntax in (
        *(DeepSeekV3Calls("deepseek_v3", True), DeepSeekV3Calls("deepseek_v31", False)),
        *(DsmlCalls("deepseek_v32", "function_calls"), DsmlCalls("deepseek_v4", "tool_calls")),
        *(KimiK2Calls(), GlmCalls("glm45", True), GlmCalls("glm47", False), HermesCalls()),
    )
}
"""How models write calls, by vLLM's names of their parsers."""
THINK = ReasoningSyntax()
REASONING: Mapping[str, ReasoningSyntax] = {
    "think": THINK,
    "kimi_k2": replace(THINK, name="kimi_k2", ended_by_calls=True),
}
OFF = "none"
CALL_ALIASES = {
    "deepseek_r1": "deepseek_v3",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "ling3": "glm47",
    "qwen": "hermes",
    "qwen25": "hermes",
}
"""Names that other engines, or other versions of vLLM, have for them."""
REASONING_ALIASES = dict.fromkeys(
    (
        *("deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
        *("glm45", "glm47", "ling3", "qwen3"),
    ),
    "think",
)
TEMPLATE = "chat template"
T = TypeVar("T")

# What a template writes, most telling first: all of these texts are in it.
_IN_TEMPLATE: tuple[tuple[tuple[str, ...], str], ...] = (
    ((DSML, "function_calls"), "deepseek_v32"),
    ((DSML, "tool_calls"), "deepseek_v4"),
    ((SEPARATOR, "```json"), "deepseek_v3"),
    ((SEPARATOR,), "deepseek_v31"),
    ((SECTION,), "kimi_k2"),
    ((KEY, "</arg_key><arg_value>"), "glm47"),
    ((KEY,), "glm45"),
    ((CALL, "arguments"), "hermes"),
)
_IN_VOCABULARY: tuple[tuple[tuple[str, ...], str], ...] = (
    ((SECTION,), "kimi_k2"),
    ((KEY, VALUE), "glm45"),
)


@dataclass(frozen=True)
class FoundFormat:
    """The format, and where its parts are from."""

    format: ChatFormat
    calls: Fact[str]
    reasoning: Fact[str]

    def __str__(self) -> str:
        named = {"reasoning": self.reasoning, "calls": self.calls}
        return ", ".join(
            f"{what} {fact.value} ({fact.source.text})" for what, fact in named.items()
        )


def find_format(
    *,
    encoding: str | None,
    templates: Mapping[str, str],
    has_token: Callable[[str], bool],
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> FoundFormat:
    """`encoding`: the name of the calls of what makes prompts instead of a template."""
    template = "\n".join(templates.values())
    calls = _named("tool_call_parser", tool_call_parser, CALLS, CALL_ALIASES)
    calls = calls or _found_calls(encoding, template, has_token)
    reasoning = _named("reasoning_parser", reasoning_parser, REASONING, REASONING_ALIASES)
    reasoning = reasoning or _found_reasoning(calls, encoding, template, has_token)
    return FoundFormat(
        ChatFormat(REASONING.get(reasoning.value), CALLS.get(calls.value)), calls, reasoning
    )


def _named(
    option: str, name: str | None, known: Mapping[str, object], aliases: Mapping[str, str]
) -> Fact[str] | None:
    if name is None:
        return None
    asked = name.lower().replace("-", "_")
    found = aliases.get(asked, asked)
    if found not in known and found != OFF:
        names = sorted({*known, *aliases, OFF})
        raise UsageError(
            f"{option} = '{short(name)}': accepted: {', '.join(names)}{did_you_mean(asked, names)}"
        )
    return Fact(found, Source("override", option))


def _found_calls(
    encoding: str | None, template: str, has_token: Callable[[str], bool]
) -> Fact[str]:
    if encoding is not None:
        return Fact(encoding, Source("formula", f"encoding of {encoding}"))
    for texts, name in _IN_TEMPLATE:
        if all(text in template for text in texts):
            return Fact(name, Source("key", f"{TEMPLATE}: {texts[0]}"))
    for texts, name in _IN_VOCABULARY:
        if all(map(has_token, texts)):
            return Fact(name, Source("key", f"vocabulary: {texts[0]}"))
    return default(OFF, f"no format's marks in {TEMPLATE} or vocabulary")


def _found_reasoning(
    calls: Fact[str], encoding: str | None, template: str, has_token: Callable[[str], bool]
) -> Fact[str]:
    name = calls.value if calls.value in REASONING else THINK.name
    if encoding is not None:
        return Fact(name, Source("formula", f"encoding of {encoding}"))
    if THINK.close in template:
        return Fact(name, Source("key", f"{TEMPLATE}: {THINK.close}"))
    if has_token(THINK.open) and has_token(THINK.close):
        return Fact(name, Source("key", f"vocabulary: {THINK.open}"))
    return default(OFF, f"no {THINK.close} in {TEMPLATE} or vocabulary")
