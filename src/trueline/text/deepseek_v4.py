"""DeepSeek-V4's chats: messages to a prompt, by the rules of the encoding that its checkpoints
have instead of a template.

A model that thinks is shown the reasoning that followed the last message of a user, and none from
before it; developers' messages from before it go with it (`drop_thinking`). With tools, all of it
stays. Results of calls are messages of the user. What is not rendered is refused by name: a prompt
without it would ask something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueline.errors import UsageError, short_repr
from trueline.text.deepseek_v4_files import FAMILY, PROFILES, V4Defaults
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
)
from trueline.text.encoding_arguments import (
    EFFORT,
    NO_EFFORT,
    SWITCHES,
    choice,
    flag,
    known,
    thinking_said,
)
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.text.vocabulary import Vocabulary

TITLE = "DeepSeek-V4"
CALLS = "tool_calls"
BEFORE = {"user": USER, "developer": USER, "latest_reminder": "<｜latest_reminder｜>"}
"""By role. Others begin without a token."""
ROLES = ("system", *BEFORE, "assistant", "tool")
LED = ("assistant", "latest_reminder")
"""Before these, as at the end, the message that asks opens the answer."""
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}
"""Short answers that a message can ask for under `task`, and the token that does."""
NOT_RENDERED = ("content_blocks", "wo_eos")
"""What the encoding knows in a message, and we do not render."""
ARGUMENTS = (*SWITCHES, EFFORT, "drop_thinking", "effort_profile")


@dataclass
class Turn:
    """A message, or those of a user that follow each other. `where` names the first."""

    where: str
    role: str
    contents: list[str]
    reasoning: str = ""
    task: str | None = None
    has_tools: bool = False


@dataclass(frozen=True)
class Mode:
    thinking: bool
    drop_thinking: bool
    effort: str
    """The text before all messages."""


class DeepSeekV4Encoding:
    title, calls, reads = TITLE, FAMILY, ARGUMENTS

    def __init__(
        self, defaults: V4Defaults, vocabulary: Vocabulary, named: Mapping[str, str]
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
        mode = read_mode(arguments, self.defaults)
        turns = read_turns(messages, tools, self.defaults.tools.value)
        self._check_tokens(turns)
        drops = mode.drop_thinking and not any(turn.has_tools for turn in turns)
        if mode.thinking and drops:
            last = _last_asking(turns)
            turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
        pieces = [self._bos, mode.effort]
        last = _last_asking(turns) if drops else -1
        for i, turn in enumerate(turns):
            answers_task = i > 0 and turns[i - 1].task is not None
            pieces += self._turn(turn, mode.thinking and i > last and not answers_task)
            if turns[i + 1].role in LED if i + 1 < len(turns) else add_generation_prompt:
                pieces.append(_lead(turn, mode.thinking, mode.thinking and i >= last))
        return "".join(pieces)

    def _turn(self, turn: Turn, shows_reasoning: bool) -> list[str]:
        content = BETWEEN.join(turn.contents)
        if turn.role != "assistant":
            return [BEFORE.get(turn.role, ""), content]
        reasoning = [turn.reasoning, END_THINK] if shows_reasoning else []
        return [*reasoning, content, self._eos]

    def _check_tokens(self, turns: Sequence[Turn]) -> None:
        needed = {self._bos, self._eos, USER, ASSISTANT, THINK, END_THINK}
        needed |= {BEFORE[turn.role] for turn in turns if turn.role in BEFORE}
        needed |= {TASKS[turn.task] for turn in turns if turn.task is not None}
        check_tokens(needed, self._vocabulary, TITLE)


def _lead(turn: Turn, thinking: bool, opens: bool) -> str:
    """Of the answer to this message."""
    if turn.task == "action":
        return ASSISTANT + (THINK if thinking else END_THINK) + TASKS["action"]
    if turn.task is not None:
        return TASKS[turn.task]
    if turn.role in ASKS:
        return ASSISTANT + (THINK if opens else END_THINK)
    return ""


def _last_asking(turns: Sequence[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ASKS), default=-1)


# -- messages --------------------------------------------------------------------------------


def read_turns(messages: Sequence[JSON], tools: object, text: ToolsText) -> list[Turn]:
    turns: list[Turn] = []
    for said in read_messages(messages, tools, roles=ROLES, title=TITLE, not_rendered=NOT_RENDERED):
        turn = _turn(said, text)
        before = turns[-1] if turns else None
        if before and before.role == turn.role == "user" and before.task is None:
            _refuse_task(turn)
            before.contents += turn.contents
            continue
        if before and turn.role not in LED:
            _refuse_task(before)
        turns.append(turn)
    return turns


def _turn(said: Said, text: ToolsText) -> Turn:
    task = said.task
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise UsageError(
            f"{said.where}.task = {short_repr(task)}: accepted: {', '.join(TASKS)}, or null"
        )
    if said.role == "tool":
        return Turn(said.where, "user", [f"<tool_result>{said.content}</tool_result>"], task=task)
    calls = [calls_text(said.calls, CALLS)] if said.calls else []
    contents = [said.content, *about(said, text), *calls]
    return Turn(said.where, said.role, contents, said.reasoning, task, bool(said.functions))


def _refuse_task(turn: Turn) -> None:
    """The encoding would leave it out."""
    if turn.task is not None:
        raise UsageError(
            f"{turn.where}.task = {turn.task!r}: accepted: of a message that is the last or "
            "before an assistant's, and that is no second one of a user"
        )


# -- arguments -------------------------------------------------------------------------------


def read_mode(arguments: Mapping[str, object], defaults: V4Defaults) -> Mode:
    given = known(arguments, ARGUMENTS, TITLE)
    profile = defaults.profile.value
    if "effort_profile" in given:
        profile = PROFILES[choice(given, "effort_profile", PROFILES)]
    effort = profile.default
    if EFFORT in given:
        effort = choice(given, EFFORT, (*profile.texts, NO_EFFORT))
    said = thinking_said(given)
    thinking = defaults.thinking.value if said is None else said
    dropped = flag(given, "drop_thinking")
    return Mode(thinking, dropped is not False, profile.texts[effort] if thinking else "")
