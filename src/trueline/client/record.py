"""One request of a benchmark: its times, and what came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trueline.client.sse import DONE, Events
from trueline.client.wire import TokenUsage, read_chunk, status_error


@dataclass(slots=True)
class Record:
    start: float = 0.0
    lag: float = 0.0
    """How late an open loop sent it."""
    first: float | None = None
    last: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between tokens. Those that come in one piece have 0 between them: so a reader sees them."""
    text_chunks: int = 0
    listed_tokens: int = 0
    usage: TokenUsage | None = None
    error: str | None = None
    """Its kind."""
    message: str = ""
    finished: bool = False
    _status: tuple[int, str, str | None] = (0, "", None)
    _events: Events = field(default_factory=Events)
    _body: bytes = b""
    _streams: bool = False

    @property
    def num_tokens(self) -> int:
        if self.usage:
            return self.usage.completion_tokens
        return self.listed_tokens or self.text_chunks

    @property
    def counted_by(self) -> str:
        return "usage" if self.usage else "token_ids" if self.listed_tokens else "frames"

    # What a connection calls.

    def head(self, status: int, reason: str, headers: dict[bytes, bytes]) -> None:
        wait = headers.get(b"retry-after")
        self._status = (status, reason, wait.decode(errors="replace") if wait else None)
        kind = headers.get(b"content-type", b"")
        self._streams = status == 200 and kind.startswith(b"text/event-stream")

    def data(self, received: bytes) -> None:
        now = time.perf_counter()
        if not self._streams:
            self._body += received
            return
        for data in self._events.feed(received):
            self._update(data, now)

    def close(self) -> None:
        """The answer is over. Raises what was wrong with it."""
        self.end = time.perf_counter()
        status, reason, wait = self._status
        if status != 200:
            raise status_error(status, reason, self._body, wait)
        for data in self._events.end():
            self._update(data, self.end)
        if not self._streams:
            self._update(self._body, self.end)

    def _update(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.finished = True
            return
        chunk = read_chunk(data)
        if chunk.usage:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self.finished |= choice.finish_reason is not None
            listed = len(choice.token_ids or ())
            self.listed_tokens += listed
            # Where ids are listed, a chunk without any is no token; text may lag behind them.
            tokens = listed or (1 if choice.answer and not self.listed_tokens else 0)
            if not tokens:
                continue
            self.text_chunks += 1
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.gaps.extend([0.0] * (tokens - 1))
            self.last = now
