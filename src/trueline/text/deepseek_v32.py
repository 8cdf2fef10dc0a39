"""DeepSeek-V3.2's chats: messages to a prompt, by the rules of the encoding that its checkpoints
have instead of a template (encoding/encoding_dsv32.py; `encoder_program` reads its constants).

A model that thinks is shown the reasoning that followed the last message of a user, and none from
before it; developers' messages from before it are left out (`drop_thinking`).

Where the published program stops, and this does not: it counts messages as if none had been left
out, and it wants reasoning or calls of every answer behind the last question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.spec.source import Fact
from trueline.text.dsml_prompts import (
    ASKS,
    ASSISTANT,
    BETWEEN,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    Said,
    ToolsText,
    about,
    calls_text,
    check_tokens,
    read_messages,
    tools_text,
)
from trueline.text.encoder_program import constants, thinking_default
from trueline.text.encoding_arguments import SWITCHES, flag, known, thinking_said
from trueline.utils.json_types import JSON
from trueline.utils.model_files import ENCODER_V32

if TYPE_CHECKING:
    from trueline.text.vocabulary import Vocabulary

FAMILY = "deepseek_v32"
TITLE = "DeepSeek-V3.2"
CALLS = "function_calls"
ROLES = ("system", "developer", "user", "assistant", "tool")
ARGUMENTS = (*SWITCHES, "drop_thinking")
DEVELOPER = "# The user's message is: "
RESULTS, END_RESULTS = "<function_results>", "</function_results>"

# Tokens of the model's input: every byte of them counts.
TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{dsml_token}function_calls>" block like the following as \
part of your reply to the user:
<{dsml_token}function_calls>
<{dsml_token}invoke name="$FUNCTION_NAME">
<{dsml_token}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE\
</{dsml_token}parameter>
...
</{dsml_token}invoke>
<{dsml_token}invoke name="$FUNCTION_NAME2">
...
</{dsml_token}invoke>
</{dsml_token}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<{dsml_token}function_calls>
...
</{dsml_token}function_calls>

<function_results>
...
</function_results>

{thinking_start_token}...thinking about results{thinking_end_token}

Here are the functions available in JSONSchema format:
<functions>
{tool_schemas}
</functions>
"""


@dataclass(frozen=True)
class V32Defaults:
    """What the checkpoint says of its chats."""

    thinking: Fact[bool]
    tools: Fact[ToolsText]

    def facts(self) -> dict[str, Fact[object]]:
        """As `inspect` shows them."""
        return {
            "thinking": self.thinking,
            "tools_text": Fact(self.tools.value.name, self.tools.source),
        }


def read_defaults(config: JSON, directory: Path | None) -> V32Defaults:
    said = constants(directory / ENCODER_V32) if directory else {}
    why = f"{FAMILY}: as other engines serve it"
    return V32Defaults(
        thinking=thinking_default(said, ENCODER_V32, False, why),
        tools=tools_text(said, ENCODER_V32, "TOOLS_SYSTEM_TEMPLATE", TOOLS),
    )


class DeepSeekV32Encoding:
    title, calls, reads = TITLE, FAMILY, ARGUMENTS

    def __init__(
        self, defaults: V32Defaults, vocabulary: Vocabulary, named: Mapping[str, str]
    ) -> None:
        self.defaults = defaults
        self._vocabulary = vocabulary
        self._bos, self._eos = named.get("bos_token", BOS), named.get("eos_token", EOS)

    def render(
        self,
        messages: Sequence[JSON],
        add_generation_prompt: bool,
        tools: object,
        arguments: Mapping[str, object],
    ) -> str:
        """`messages` as `check_messages` leaves them."""
        given = known(arguments, ARGUMENTS, TITLE)
        asked = thinking_said(given)
        thinking = self.defaults.thinking.value if asked is None else asked
        drops = flag(given, "drop_thinking") is not False
        read = read_messages(messages, tools, roles=ROLES, title=TITLE, not_rendered=("task",))
        if thinking and drops:
            last = _last_asking(read)
            read = [said for i, said in enumerate(read) if i >= last or said.role != "developer"]
        needed = {self._bos, self._eos, USER, ASSISTANT, THINK, END_THINK}
        check_tokens(needed, self._vocabulary, TITLE)
        last, pieces = _last_asking(read), [self._bos]
        for i, said in enumerate(read):
            more = i + 1 < len(read)
            after = read[i + 1].role if more else None
            thinks = thinking and (i == last if said.role in ASKS else i > last)
            pieces += self._message(said, read[i - 1].role if i else "", after, thinks)
            if more or add_generation_prompt:
                pieces += _lead(said.role, after, THINK if thinks else END_THINK)
        return "".join(pieces)

    def _message(self, said: Said, before: str, after: str | None, thinks: bool) -> list[str]:
        parts = about(said, self.defaults.tools.value)
        match said.role:
            case "system":
                return [BETWEEN.join([said.content, *parts])]
            case "developer":
                return [USER, BETWEEN.join(["", *parts, DEVELOPER + said.content])]
            case "user":
                return [USER, said.content]
            case "tool":
                opened = "" if before == "tool" else BETWEEN + RESULTS
                closed = "" if after == "tool" else "\n" + END_RESULTS
                return [opened, "\n<result>", said.content, "</result>", closed]
        written = [calls_text(said.calls, CALLS)] if said.calls else []
        reasoning = [said.reasoning, END_THINK] if thinks else []
        return [*reasoning, BETWEEN.join([said.content, *written]), self._eos]


def _lead(role: str, after: str | None, mark: str) -> list[str]:
    """Of the answer to this message: behind every question, and behind the last result."""
    if role in ASKS:
        return [ASSISTANT, mark]
    return [BETWEEN, mark] if role == "tool" and after != "tool" else []


def _last_asking(read: Sequence[Said]) -> int:
    return max((i for i, said in enumerate(read) if said.role in ASKS), default=-1)
