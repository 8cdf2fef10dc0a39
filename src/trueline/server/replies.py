"""Answers as ASGI responses. A client that goes away ends the work; one that reads slowly holds up
nobody but itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trueline.outputs import RequestOutput
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.frames import failure
from trueline.server.service import PER_SCORE, Run

DONE = b"data: [DONE]\n\n"
SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers would hold tokens back
]


class Frames(Protocol):
    """What the protocol makes of outputs."""

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]: ...

    def weight(self, outputs: Sequence[RequestOutput]) -> int: ...

    def final_usage(self) -> bytes | None: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes: ...


class Reply(Response):
    """Runs when it is sent."""

    def __init__(self, run: Run, frames: Frames, stream: bool, told: dict[str, object]) -> None:
        self.run, self.frames, self.streams = run, frames, stream
        self.told = told
        """What the log will say."""
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._stream(send) if self.streams else self._whole(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.told["client"] = "gone"
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        finally:
            gone.cancel()
            work.cancel()
            self._account()

    def _account(self) -> None:
        answers = self.run.answers
        completions = [copy.completion for answer in answers for copy in answer.copies]
        self.told["prompt_tokens"] = sum(len(answer.ids) for answer in answers)
        self.told["output_tokens"] = sum(len(each.token_ids) for each in completions)
        self.told["finish"] = ",".join(each.finish_reason or "none" for each in completions)

    async def _whole(self, send: Send) -> None:
        async with self._in_time() as outputs:
            async for _ in outputs:
                pass
        body = await self._aside(self.frames.whole)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """The status waits for the first news: whoever is refused hears it there."""
        started = False
        try:
            async with self._in_time() as outputs:
                async for _ in outputs:
                    if not started:
                        if error := failure(self._all()):
                            raise error
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": SSE})
                    data = await self._aside(self._delta)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            failed = failure(self._all())
            data = b"" if failed else (self.frames.final_usage() or b"") + DONE
        except ApiError as error:
            if not started:
                raise
            failed, data = error, error.frame()
        if failed:
            self.told["error"] = failed.message
        await send({"type": "http.response.body", "body": data})

    async def _aside(self, make: Callable[[Sequence[RequestOutput]], bytes]) -> bytes:
        outputs = self._all()
        weight = self.frames.weight(outputs) * PER_SCORE
        return await self.run.service.aside(weight, make, outputs)

    def _delta(self, outputs: Sequence[RequestOutput]) -> bytes:
        return b"".join(self.frames.delta(outputs))

    def _all(self) -> list[RequestOutput]:
        return [answer.output() for answer in self.run.answers]

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """The outputs, to be read and sent before the request is given up: the engine does not work
        longer for a client that does not read, either."""
        seconds = self.run.service.config.request_timeout
        try:
            async with asyncio.timeout(seconds), aclosing(self.run.outputs()) as outputs:
                yield outputs
        except TimeoutError:
            told = f"not done after {seconds:g} s, which is this server's limit"
            raise ApiError(504, told, code="timeout") from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    more = dict(headers or {})
    if error.retry_after is not None:
        more["retry-after"] = str(error.retry_after)
    if error.status == 401:
        more["www-authenticate"] = "Bearer"
    return Response(error.body(), error.status, more, "application/json")
