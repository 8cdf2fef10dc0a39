"""What a DeepSeek-V4 checkpoint's files say of its chats: the texts for each reasoning effort, and
the defaults.

It has no template. It has encoding/encoding_dsv4.py, a program that we read and do not run: its
rules are in `deepseek_v4`, and what differs between checkpoints are constants in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from trueline.spec.source import Fact, Source, default, formula
from trueline.text.dsml_prompts import ToolsText, tools_text
from trueline.text.encoder_program import constants, thinking_default
from trueline.utils.json_types import JSON
from trueline.utils.model_files import ENCODER_V4

FAMILY = "deepseek_v4"
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


TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{dsml_token}tool_calls>" block like the following:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="$TOOL_NAME">
<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE\
</{dsml_token}parameter>
...
</{dsml_token}invoke>
<{dsml_token}invoke name="$TOOL_NAME2">
...
</{dsml_token}invoke>
</{dsml_token}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {thinking_start_token}), you MUST output your complete \
reasoning inside {thinking_start_token}...{thinking_end_token} BEFORE any tool calls or final \
response.

Otherwise, output directly after {thinking_end_token} with tool calls or final response.

### Available Tool Schemas

{tool_schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True)
class V4Defaults:
    """Of requests that do not say, and what the checkpoint's program has."""

    profile: Fact[EffortProfile]
    thinking: Fact[bool]
    tools: Fact[ToolsText]

    def facts(self) -> dict[str, Fact[object]]:
        """As `inspect` shows them."""
        profile, source = self.profile.value, self.profile.source
        return {
            "thinking": self.thinking,
            "effort_profile": Fact(profile.name, source),
            "efforts": Fact(tuple(profile.texts), source),
            "reasoning_effort": Fact(profile.default, source),
            "tools_text": Fact(self.tools.value.name, self.tools.source),
        }


def read_defaults(config: JSON, directory: Path | None) -> V4Defaults:
    """Without a directory, from the config alone."""
    said = constants(directory / ENCODER_V4) if directory else {}
    return V4Defaults(
        profile=_said_profile(said) or _profile_of(config),
        thinking=thinking_default(said, ENCODER_V4, True, f"{FAMILY}: as its makers serve it"),
        tools=tools_text(said, ENCODER_V4, "TOOLS_TEMPLATE", TOOLS),
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
    return Fact(EffortProfile(name, texts, chosen), Source("key", f"{ENCODER_V4}: {key}"))


def _is_table(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(
        isinstance(text, str) for item in value.items() for text in item
    )


def _profile_of(config: JSON) -> Fact[EffortProfile]:
    key = next((key for key in config if key.startswith(DRAFTING)), None)
    if key is None:
        return default(PREVIEW, f"{FAMILY} without drafting keys ({DRAFTING}*)")
    return formula(OFFICIAL, f"{FAMILY} with {key}")
