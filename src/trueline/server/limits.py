"""Reads request bodies within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message, Receive

from trueline.server.protocol.errors import ApiError

DISCARD_SECONDS = 5.0
"""To read on, and discard, the body of a request that is refused."""
QUIET_SECONDS = 1.0
"""Without a byte, after which the client is taken to have stopped sending."""


def too_large(limit: int) -> ApiError:
    message = f"the request's body is larger than {limit} bytes, which is this server's limit"
    return ApiError(413, message, code="body_too_large")


class UnreadBody:
    """The part of a body that is unread when its request is refused. It is read and discarded: a
    client that is still sending when the connection closes gets a reset in place of the error."""

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes]) -> None:
        self._receive = receive
        self._coming = b"expect" not in headers  # "100-continue": it is sent only when it is read

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body"):
            self._coming = False
        return message

    async def discard(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + DISCARD_SECONDS
        with suppress(TimeoutError):
            while self._coming and clock() < end:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self.receive()


class BodyReader:
    """Reads bodies; `give_up` refuses those that are being read."""

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit, self.seconds = limit, seconds
        self._reading: set[asyncio.Timeout] = set()
        self._why: ApiError | None = None

    async def read(self, request: Request) -> bytes:
        """Also of a request without a Content-Length."""
        try:
            async with asyncio.timeout(self.seconds) as timeout:
                self._reading.add(timeout)
                try:
                    return await self._chunks(request)
                finally:
                    self._reading.discard(timeout)
        except TimeoutError:
            message = f"the request's body did not come within {self.seconds:g} s"
            raise self._why or ApiError(408, message, code="body_timeout") from None

    def give_up(self, why: ApiError) -> None:
        self._why, now = why, asyncio.get_running_loop().time()
        for timeout in self._reading:
            timeout.reschedule(now)

    async def _chunks(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.limit:
                raise too_large(self.limit)
            chunks.append(chunk)
        return b"".join(chunks)
