"""Bodies of bounded size, that come in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Message, Receive

from trueline.server.protocol.errors import ApiError

DISCARD_SECONDS = 5.0
"""For the rest of a body that nobody wants."""
QUIET_SECONDS = 1.0
"""After which nothing of it is taken to be on its way."""


def too_large(limit: int) -> ApiError:
    message = f"the request's body is larger than {limit} bytes, which is this server's limit"
    return ApiError(413, message, code="body_too_large")


class Rest:
    """What nobody has read of a body when its request is refused. Whoever is still sending it when
    the connection is closed would not hear why."""

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes]) -> None:
        self._receive = receive
        self._coming = b"expect" not in headers  # then it comes only when it is asked for

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


class Bodies:
    """Reads them; those on their way can be given up."""

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit, self.seconds = limit, seconds
        self._coming: set[asyncio.Timeout] = set()
        self._why: ApiError | None = None

    async def read(self, request: Request) -> bytes:
        """Also where nobody says beforehand how long it is."""
        try:
            async with asyncio.timeout(self.seconds) as patience:
                self._coming.add(patience)
                try:
                    return await self._chunks(request)
                finally:
                    self._coming.discard(patience)
        except TimeoutError:
            message = f"the request's body did not come within {self.seconds:g} s"
            raise self._why or ApiError(408, message, code="body_timeout") from None

    def give_up(self, why: ApiError) -> None:
        self._why, now = why, asyncio.get_running_loop().time()
        for patience in self._coming:
            patience.reschedule(now)

    async def _chunks(self, request: Request) -> bytes:
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.limit:
                raise too_large(self.limit)
            chunks.append(chunk)
        return b"".join(chunks)
