"""uvicorn's HTTP protocol with what it lacks: limits on the time and the size of a request's head,
and a disconnect that reaches every pipelined request."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""A longer head that is not complete gets 431. One that comes in a single read may be longer."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


def connection(seconds: float) -> type[asyncio.Protocol]:
    """A protocol that closes a connection whose head is not complete after so many seconds."""

    class HttpConnection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.head_timer: asyncio.TimerHandle | None = None
            self.unanswered: deque[RequestResponseCycle] = deque()
            self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            # uvicorn disconnects the last request alone; of pipelined ones, another one is running
            for cycle in self.unanswered:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start_head_timer()

        def on_headers_complete(self) -> None:
            self._stop_head_timer()
            super().on_headers_complete()
            self.unanswered.append(self.cycle)
            while self.unanswered[0].response_complete:
                self.unanswered.popleft()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.head_timer is not None and not self.transport.is_closing():
                self.head_bytes += len(data)
                if self.head_bytes > MAX_HEAD_BYTES:
                    self.transport.write(TOO_LARGE)
                    self.transport.close()

        def _start_head_timer(self) -> None:
            self._stop_head_timer()
            self.head_bytes = 0
            self.head_timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_head_timer(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

    return HttpConnection
