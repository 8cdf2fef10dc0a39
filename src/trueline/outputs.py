"""What a user gets back, under the names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""Per position: token id -> Logprob, of the raw distribution."""


@dataclass(slots=True)
class ToolCall:
    """A call of a function that the answer makes, as far as it has come."""

    id: str
    name: str
    place: int
    """How many characters of the content come before it."""
    arguments: str = ""
    """JSON text; whole only with the end of the call."""
    ended: bool = False


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that cannot be made: its text is part of the content."""

    index: int | None
    """Of the call that had begun; None where none had."""
    reason: str
    text: str
    """As the model wrote it."""


PartKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class OutputPart:
    """A stretch of an answer. Its text ends where the next one of its kind begins."""

    kind: PartKind
    start: int
    """Where in the reasoning or the text it begins; of a call, which of them it is."""
    first_token: int
    """Of the answer's tokens: the one that began it."""
    end_token: int
    """Behind the last one that it has text of, so far."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    """Of an answer that is read by its chat's format: the content."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Where logprobs were asked for."""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: int | str | None = None
    error: str | None = None
    client_error: bool = False
    """The error is what the request asks for, as a grammar and bad_words that leave no token."""
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    """Without its markers."""
    calls: list[ToolCall] = field(default_factory=list)
    """In the order in which they began; one that has not ended when the answer has is malformed."""
    malformed: list[MalformedCall] = field(default_factory=list)
    """Calls that cannot be made, as they broke off."""
    parts: list[OutputPart] = field(default_factory=list)
    """What the answer consists of, in order."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
