"""What a DeepSeek-V4 checkpoint's files say of its chats: the texts for each reasoning effort, and
the defaults.

It has no template. It has encoding/encoding_dsv4.py, a program that we read and do not run: its
rules are in `deepseek_v4`, and what differs between checkpoints are constants in it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from trueline.errors import UsageError, short_repr
from trueline.spec.source import Fact, Source, default, formula
from trueline.utils.json_types import JSON

FAMILY = "deepseek_v4"
ENCODER = "encoding/encoding_dsv4.py"
MOST_BYTES = 1 << 20
"""Of the encoder. Those published have 40 kB."""
DRAFTING = "dspark_"
"""What config keys begin with that came with the official profile."""

# Tokens of the model's input: every byte of them counts.
_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


@dataclass(frozen=True)
class EffortProfile:
    """Which efforts there are. The same name is another text in another profile."""

    name: str
    texts: dict[str, str]
    """By effort: what stands before the first message where the model thinks."""
    default: str


PREVIEW = EffortProfile("preview", {"high": "", "max": _ABSOLUTE}, "high")
OFFICIAL = EffortProfile("official", {"low": "", "high": _ABSOLUTE, "max": _BEYOND}, "low")
PROFILES = {profile.name: profile for profile in (PREVIEW, OFFICIAL)}


@dataclass(frozen=True)
class ChatDefaults:
    """Of requests that do not say."""

    profile: Fact[EffortProfile]
    thinking: Fact[bool]

    def facts(self) -> dict[str, Fact[object]]:
        """As `inspect` shows them."""
        profile, source = self.profile.value, self.profile.source
        return {
            "thinking": self.thinking,
            "effort_profile": Fact(profile.name, source),
            "efforts": Fact(tuple(profile.texts), source),
            "reasoning_effort": Fact(profile.default, source),
        }


def read_chat_defaults(config: JSON, directory: Path | None) -> ChatDefaults | None:
    """None: no DeepSeek-V4. Without a directory, from the config alone."""
    if config.get("model_type") != FAMILY:
        return None
    file = directory / ENCODER if directory else None
    said = _constants(file) if file and file.is_file() else {}
    return ChatDefaults(
        profile=_said_profile(said) or _profile_of(config), thinking=_thinking(said)
    )


def _said_profile(said: Mapping[str, object]) -> Fact[EffortProfile] | None:
    """Texts as the checkpoint has them, under the name of the profile that they are, if any."""
    texts, chosen = said.get("REASONING_EFFORT_PROMPTS"), said.get("DEFAULT_REASONING_EFFORT")
    largest = said.get("REASONING_EFFORT_MAX")
    if _is_table(texts) and isinstance(chosen, str) and chosen in texts:
        key = "REASONING_EFFORT_PROMPTS"
    elif isinstance(largest, str):
        texts, chosen, key = (
            PREVIEW.texts | {"max": largest},
            PREVIEW.default,
            "REASONING_EFFORT_MAX",
        )
    else:
        return None
    name = next((known.name for known in PROFILES.values() if known.texts == texts), "its own")
    return Fact(EffortProfile(name, texts, chosen), Source("key", f"{ENCODER}: {key}"))


def _is_table(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(
        isinstance(text, str) for item in value.items() for text in item
    )


def _profile_of(config: JSON) -> Fact[EffortProfile]:
    key = next((key for key in config if key.startswith(DRAFTING)), None)
    if key is None:
        return default(PREVIEW, f"{FAMILY} without drafting keys ({DRAFTING}*)")
    return formula(OFFICIAL, f"{FAMILY} with {key}")


def _thinking(said: Mapping[str, object]) -> Fact[bool]:
    mode = said.get("thinking_mode")
    if mode in ("thinking", "chat"):
        return Fact(mode == "thinking", Source("key", f"{ENCODER}: encode_messages"))
    return default(True, f"{FAMILY}: as its makers serve it")


def _constants(file: Path) -> dict[str, object]:
    """What the program assigns at its top that is a plain value, and encode_messages' default
    for thinking_mode, where it has one."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file}: {file.stat().st_size} bytes; accepted: up to {MOST_BYTES}")
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{file}: cannot be read as Python ({short_repr(error)})") from error
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "encode_messages":
            _literal(found, "thinking_mode", _defaults(node.args).get("thinking_mode"))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    _literal(found, target.id, node.value)
    return found


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    given = [*arguments.posonlyargs, *arguments.args]
    last = given[len(given) - len(arguments.defaults) :]
    named = (*zip(last, arguments.defaults, strict=True),)
    named += (*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),)  # type: ignore[arg-type]
    return {argument.arg: value for argument, value in named}


def _literal(found: dict[str, object], name: str, node: ast.expr | None) -> None:
    try:
        found[name] = None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        found.pop(name, None)  # computed: nothing that we read
