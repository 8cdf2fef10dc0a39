"""What uvicorn leaves open of a connection: how long, and how large, a request's head may be, and
who hears of its end."""

from __future__ import annotations

import asyncio
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Whoever sends more without coming to an end gets 431. Some more pass where they come at once."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"


def connection(seconds: float) -> type[asyncio.Protocol]:
    """For clients that have so many seconds for a head; then they are left."""

    class HttpConnection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.patience: asyncio.TimerHandle | None = None
            self.unanswered: deque[RequestResponseCycle] = deque()
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_there()
            # uvicorn tells the last request that came; of several, another one is running
            for cycle in self.unanswered:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_head()

        def on_headers_complete(self) -> None:
            self._head_is_there()
            super().on_headers_complete()
            self.unanswered.append(self.cycle)
            while self.unanswered[0].response_complete:
                self.unanswered.popleft()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.patience is not None and not self.transport.is_closing():
                self.head_bytes += len(data)
                if self.head_bytes > MAX_HEAD_BYTES:
                    self.transport.write(TOO_LARGE)
                    self.transport.close()

        def _wait_for_head(self) -> None:
            self._head_is_there()
            self.head_bytes = 0
            self.patience = self.loop.call_later(seconds, self.transport.close)

        def _head_is_there(self) -> None:
            if self.patience is not None:
                self.patience.cancel()
                self.patience = None

    return HttpConnection
