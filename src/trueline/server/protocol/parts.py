"""An answer's parts as they come, for protocols that tell reasoning, text and calls as items of one
list. A whole answer is told by the same pieces as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trueline.outputs import CompletionOutput, OutputPart, PartKind, ToolCall


class PartPiece(NamedTuple):
    """What is new of a part."""

    place: int
    """Of the part in the answer."""
    kind: PartKind
    call: ToolCall | None
    begins: bool
    text: str
    """Of a call, of its arguments."""
    tokens: range
    """Which of the answer's tokens."""
    ends: bool


class PartProgress:
    """How much of one completion was told. `pieces` gives what is new, and takes it for told."""

    def __init__(self) -> None:
        self._index = self._chars = self.num_tokens = 0
        self._begun = False

    def pieces(self, completion: CompletionOutput) -> Iterator[PartPiece]:
        parts = completion.parts
        while self._index < len(parts):
            index, later = self._index, parts[self._index + 1 :]
            part = parts[index]
            ends = bool(later) or completion.finished
            call = completion.calls[part.start] if part.kind == "call" else None
            text = _text(completion, part, later, call, self._chars)
            begins, self._begun = not self._begun, True
            if begins:
                self.num_tokens = part.first_token
            tokens = range(self.num_tokens, part.end_token)
            self._chars += len(text)
            self.num_tokens = tokens.stop
            if begins or text or tokens or ends:
                yield PartPiece(index, part.kind, call, begins, text, tokens, ends)
            if not ends:
                return
            self._index, self._chars, self._begun = index + 1, 0, False


def _text(
    completion: CompletionOutput,
    part: OutputPart,
    later: Sequence[OutputPart],
    call: ToolCall | None,
    told: int,
) -> str:
    if call is not None:
        return call.arguments[told:]
    whole = completion.reasoning if part.kind == "reasoning" else completion.text
    end = next((each.start for each in later if each.kind == part.kind), len(whole))
    return whole[part.start + told : end]
