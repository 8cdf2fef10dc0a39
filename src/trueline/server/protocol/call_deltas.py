"""Calls of an answer as responses tell them: whole, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trueline.outputs import CompletionOutput, MalformedCall, ToolCall
from trueline.server.protocol.responses import (
    CalledFunction,
    CalledTool,
    FunctionDelta,
    MalformedToolCall,
    ToolCallDelta,
)


class CallPiece(NamedTuple):
    """What is new of a call."""

    place: int
    """Of the call in the answer."""
    call: ToolCall
    begins: bool
    arguments: str


class CallProgress:
    """How much of one completion's calls was told. `pieces` and `malformed` give what is new, and
    take it for told."""

    def __init__(self) -> None:
        self._arguments: list[int] = []
        """Of each call that has begun, so many characters."""
        self._malformed = 0

    def pieces(self, completion: CompletionOutput) -> Iterator[CallPiece]:
        for index, call in enumerate(completion.calls):
            begins = index == len(self._arguments)
            if begins:
                self._arguments.append(0)
            new = call.arguments[self._arguments[index] :]
            self._arguments[index] += len(new)
            if begins or new:
                yield CallPiece(index, call, begins, new)

    def malformed(self, completion: CompletionOutput) -> list[MalformedCall]:
        found = completion.malformed[self._malformed :]
        self._malformed += len(found)
        return found


def has_calls(completion: CompletionOutput) -> bool:
    """Such as can be made."""
    return any(call.ended for call in completion.calls)


def called_tools(completion: CompletionOutput) -> list[CalledTool]:
    return [
        CalledTool(id=call.id, function=CalledFunction(call.name, call.arguments))
        for call in completion.calls
        if call.ended
    ]


def call_delta(piece: CallPiece) -> ToolCallDelta:
    """One for each chunk: clients read the first of a list and no other."""
    if piece.begins:
        function = FunctionDelta(piece.call.name, piece.arguments)
        return ToolCallDelta(
            index=piece.place, id=piece.call.id, type="function", function=function
        )
    return ToolCallDelta(index=piece.place, function=FunctionDelta(arguments=piece.arguments))


def malformed_calls(malformed: Sequence[MalformedCall]) -> list[MalformedToolCall]:
    return [MalformedToolCall(each.index, each.reason, each.text) for each in malformed]
