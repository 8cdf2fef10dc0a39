"""DeepSeek-V4's chats: messages to a prompt, by the rules of the encoding that its checkpoints
have instead of a template.

A model that thinks is shown the reasoning that followed the last message of a user, and none from
before it; developers' messages from before it go with it (`drop_thinking`). What is not rendered
is refused by name: a prompt without it would ask something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trueline.errors import UsageError, did_you_mean, short, short_repr
from trueline.text.deepseek_v4_files import PROFILES, ChatDefaults
from trueline.text.vocabulary import Vocabulary
from trueline.utils.json_types import JSON

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
BEFORE = {"user": USER, "developer": USER, "latest_reminder": "<｜latest_reminder｜>"}
"""By role. Others begin without a token."""
ROLES = ("system", *BEFORE, "assistant")
ASKS = ("user", "developer")
LED = ("assistant", "latest_reminder")
"""Before these, as at the end, the message that asks opens the answer."""
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}
"""Short answers that a message can ask for under `task`, and the token that does."""
NOT_RENDERED = ("tools", "tool_calls", "response_format", "content_blocks", "wo_eos")
"""What the encoding knows in a message, and we do not render."""
BETWEEN = "\n\n"
"""Messages of a user that follow each other are one."""
ARGUMENTS = ("thinking", "enable_thinking", "reasoning_effort", "drop_thinking", "effort_profile")
NO_EFFORT = "none"
"""No thinking, by the name that clients have for it."""


@dataclass
class Turn:
    """A message, or those of a user that follow each other. `where` names the first."""

    where: str
    role: str
    contents: list[str]
    reasoning: str = ""
    task: str | None = None


@dataclass(frozen=True)
class Mode:
    thinking: bool
    drop_thinking: bool
    effort: str
    """The text before all messages."""


class DeepSeekV4Encoding:
    def __init__(
        self, defaults: ChatDefaults, vocabulary: Vocabulary, named: Mapping[str, str]
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
        if tools:
            raise UsageError(f"tools = {short_repr(tools)}: DeepSeek-V4's are not rendered; "
                             "accepted: none")  # fmt: skip
        mode, turns = read_mode(arguments, self.defaults), read_turns(messages)
        self._check_tokens(turns)
        if mode.thinking and mode.drop_thinking:
            last = _last_asking(turns)
            turns = [turn for i, turn in enumerate(turns) if i >= last or turn.role != "developer"]
        pieces = [self._bos, mode.effort]
        last = -1 if not mode.drop_thinking else _last_asking(turns)
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
        """Text that only looks like a token means nothing to the model."""
        needed = {self._bos, self._eos, USER, ASSISTANT, THINK, END_THINK}
        needed |= {BEFORE[turn.role] for turn in turns if turn.role in BEFORE}
        needed |= {TASKS[turn.task] for turn in turns if turn.task is not None}
        missing = sorted(name for name in needed if self._vocabulary.token_id(name) is None)
        if missing:
            raise UsageError(
                f"chat: DeepSeek-V4's encoding needs {', '.join(missing)}, which this vocabulary "
                "does not have; accepted: a chat_template, or a prompt instead of messages"
            )


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


def read_turns(messages: Sequence[JSON]) -> list[Turn]:
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        turn = _read_turn(f"messages[{i}]", message)
        before = turns[-1] if turns else None
        if before and before.role == turn.role == "user" and before.task is None:
            _refuse_task(turn)
            before.contents += turn.contents
            continue
        if before and turn.role not in LED:
            _refuse_task(before)
        turns.append(turn)
    return turns


def _read_turn(where: str, message: JSON) -> Turn:
    for name in NOT_RENDERED:
        if message.get(name):
            raise UsageError(f"{where}.{name}: not rendered for DeepSeek-V4; accepted: none")
    role, content, task = message["role"], message.get("content") or "", message.get("task")
    reasoning = message.get("reasoning_content") or ""
    if role not in ROLES:
        raise UsageError(
            f"{where}.role = {short_repr(role)}: accepted by DeepSeek-V4's encoding: "
            f"{', '.join(ROLES)}{did_you_mean(role, ROLES)}"
        )
    if role == "developer" and not content:
        raise UsageError(f"{where}.content is empty; accepted of a developer: a text")
    if not isinstance(reasoning, str):
        raise UsageError(f"{where}.reasoning_content = {short_repr(reasoning)}: accepted: a text")
    if task is not None and not (isinstance(task, str) and task in TASKS):
        raise UsageError(
            f"{where}.task = {short_repr(task)}: accepted: {', '.join(TASKS)}, or null"
        )
    return Turn(where, role, [content], reasoning, task)


def _refuse_task(turn: Turn) -> None:
    """The encoding would leave it out."""
    if turn.task is not None:
        raise UsageError(
            f"{turn.where}.task = {turn.task!r}: accepted: of a message that is the last or "
            "before an assistant's, and that is no second one of a user"
        )


# -- arguments -------------------------------------------------------------------------------


def read_mode(arguments: Mapping[str, object], defaults: ChatDefaults) -> Mode:
    for name in arguments:
        if name not in ARGUMENTS:
            raise _wrong(name, "not known to DeepSeek-V4's encoding", ", ".join(ARGUMENTS))
    given = {name: value for name, value in arguments.items() if value is not None}
    profile = defaults.profile.value
    if "effort_profile" in given:
        profile = PROFILES[_choice(given, "effort_profile", PROFILES)]
    effort = profile.default
    if "reasoning_effort" in given:
        effort = _choice(given, "reasoning_effort", (*profile.texts, NO_EFFORT))
    said = {flag for name in ARGUMENTS[:2] if (flag := _flag(given, name)) is not None}
    said |= {False} if effort == NO_EFFORT else set()
    if len(said) > 1:
        names = [name for name in ARGUMENTS[:3] if name in given]
        raise _wrong(names[0], f"{short_repr(given[names[0]])} contradicts the other",
                     f"what {' and '.join(names[1:])} says")  # fmt: skip
    thinking = said.pop() if said else defaults.thinking.value
    dropped = _flag(given, "drop_thinking")
    return Mode(thinking, dropped is not False, profile.texts[effort] if thinking else "")


def _choice(given: Mapping[str, object], name: str, accepted: Iterable[str]) -> str:
    value, names = given[name], list(accepted)
    if isinstance(value, str) and value in names:
        return value
    raise _wrong(name, short_repr(value), ", ".join(names))


def _flag(given: Mapping[str, object], name: str) -> bool | None:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise _wrong(name, short_repr(value), "true or false")


def _wrong(name: str, found: str, accepted: str) -> UsageError:
    return UsageError(f"chat_template_kwargs.{short(name)}: {found}; accepted: {accepted}")
