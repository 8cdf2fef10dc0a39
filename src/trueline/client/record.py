"""One request of a benchmark: its times, and what came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trueline.client.sse import DONE, Events
from trueline.client.wire import Usage, read_frame, status_error


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
    text_frames: int = 0
    listed_tokens: int = 0
    usage: Usage | None = None
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
        return self.listed_tokens or self.text_frames

    @property
    def counted_by(self) -> str:
        return "usage" if self.usage else "token_ids" if self.listed_tokens else "frames"

    # What a connection calls.

    def head(self, status: int, reason: str, headers: dict[bytes, bytes]) -> None:
        wait = headers.get(b"retry-after")
        self._status = (status, reason, wait.decode(errors="replace") if wait else None)
        kind = headers.get(b"content-type", b"")
        self._streams = status == 200 and kind.startswith(b"text/event-stream")

    def data(self, chunk: bytes) -> None:
        now = time.perf_counter()
        if not self._streams:
            self._body += chunk
            return
        for data in self._events.feed(chunk):
            self._take(data, now)

    def close(self) -> None:
        """The answer is over. Raises what was wrong with it."""
        self.end = time.perf_counter()
        status, reason, wait = self._status
        if status != 200:
            raise status_error(status, reason, self._body, wait)
        for data in self._events.end():
            self._take(data, self.end)
        if not self._streams:
            self._take(self._body, self.end)

    def _take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.finished = True
            return
        frame = read_frame(data)
        if frame.usage:
            self.usage = frame.usage
        for choice in frame.choices:
            self.finished |= choice.finish_reason is not None
            listed = len(choice.token_ids or ())
            self.listed_tokens += listed
            # Where ids are listed, a frame without any is no token; text may lag behind them.
            tokens = listed or (1 if choice.answer and not self.listed_tokens else 0)
            if not tokens:
                continue
            self.text_frames += 1
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.gaps.extend([0.0] * (tokens - 1))
            self.last = now
