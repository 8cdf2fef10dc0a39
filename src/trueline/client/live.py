"""An answer on a terminal as it comes, with its speed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trueline.client.response import StreamedResponse
from trueline.client.wire import CallPiece, Chunk

SECONDS_BETWEEN = 0.1
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
STEERING = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Control characters: what a model says must not move the cursor or rename the window."""


class Screen:
    """Text goes to stdout. The speed goes to the last row of the terminal, which is kept out of
    scrolling meanwhile; where stdout is not a terminal, to a line of its own on stderr."""

    def __init__(self) -> None:
        self.shares = sys.stdout.isatty()
        self.live = sys.stderr.isatty()
        self._rows = 0
        self._next = 0.0
        self._thinking = False

    @contextmanager
    def answering(self) -> Iterator[Screen]:
        self._next = time.perf_counter() + SECONDS_BETWEEN
        try:
            yield self
        finally:
            self._speak(False)
            sys.stdout.flush()
            self._release()

    def show(self, answer: StreamedResponse, chunk: Chunk) -> None:
        for choice in chunk.choices:
            if choice.thought and self.shares:
                self._speak(True)
                self._write(choice.thought)
            if choice.answer:
                self._speak(False)
                self._write(choice.answer)
            for piece in choice.calls:
                self._speak(False)
                self._call(piece, answer)
        sys.stdout.flush()
        if self.live and time.perf_counter() >= self._next:
            self._next = time.perf_counter() + SECONDS_BETWEEN
            self._status(answer)

    def _call(self, piece: CallPiece, answer: StreamedResponse) -> None:
        """On a line of its own: the name, and the arguments as they come."""
        if piece.function.name:
            begun = bool(answer.text) or len(answer.calls) > 1
            self._write(("\n" if begun else "") + f"calls {piece.function.name} ")
        self._write(piece.function.arguments or "")

    def _write(self, text: str) -> None:
        sys.stdout.write(text.translate(STEERING) if self.shares else text)

    def _speak(self, thinking: bool) -> None:
        if thinking != self._thinking:
            sys.stdout.write(DIM if thinking else PLAIN + "\n")
            self._thinking = thinking

    def _status(self, answer: StreamedResponse) -> None:
        columns, rows = shutil.get_terminal_size()
        rate = answer.tokens_per_s
        words = f"{answer.num_tokens} tokens" + (f", {rate:.1f} tokens/s" if rate else "")
        words = words[: columns - 1]
        if not self.shares:
            sys.stderr.write(f"\r\x1b[K{words}")
        else:
            if rows != self._rows:
                self._reserve(rows)
            sys.stderr.write(f"\x1b7\x1b[{rows};1H\x1b[K{DIM}{words}{PLAIN}\x1b8")
        sys.stderr.flush()

    def _reserve(self, rows: int) -> None:
        """Down and up in the same column makes the last row free; setting the region moves the
        cursor home, hence save and restore."""
        sys.stderr.write(f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
        self._rows = rows

    def _release(self) -> None:
        if self._rows:
            sys.stderr.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[K\x1b8")
            self._rows = 0
        elif self.live and not self.shares:
            sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
