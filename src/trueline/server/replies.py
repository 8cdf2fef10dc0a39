"""Responses of generating routes. A client that disconnects aborts its sequences in the engine; one
that reads slowly delays nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trueline.outputs import RequestOutput
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.failure import failure
from trueline.server.protocol.messages_api.objects import message_error
from trueline.server.service import PER_SCORE, Generation

SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect answers would hold tokens back
]


class ResponseWriter(Protocol):
    """Turns outputs into the bytes of a response."""

    response_id: str

    def delta(self, outputs: Sequence[RequestOutput]) -> Iterable[bytes]: ...

    def weight(self, outputs: Sequence[RequestOutput]) -> int: ...

    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes: ...


class Reply(Response):
    """Generates while it is sent."""

    def __init__(
        self,
        generation: Generation,
        writer: ResponseWriter,
        stream: bool,
        log_fields: dict[str, object],
    ) -> None:
        self.generation, self.writer, self.streams = generation, writer, stream
        self.outputs = [state.output for state in generation.states]
        """One for every prompt."""
        self.log_fields = log_fields
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._stream(send) if self.streams else self._whole(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.log_fields["client"] = "gone"
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work
        finally:
            gone.cancel()
            work.cancel()
            self._account()

    def _account(self) -> None:
        completions = [each for output in self.outputs for each in output.outputs]
        self.log_fields["prompt_tokens"] = sum(len(each.prompt_token_ids) for each in self.outputs)
        self.log_fields["output_tokens"] = sum(len(each.token_ids) for each in completions)
        self.log_fields["finish"] = ",".join(each.finish_reason or "none" for each in completions)

    async def _whole(self, send: Send) -> None:
        async with self._in_time() as outputs:
            async for _ in outputs:
                pass
        body = await self._offload(self.writer.whole)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """The status waits for the first output: that of a request which the engine refuses is an
        error."""
        started = False
        try:
            async with self._in_time() as outputs:
                async for _ in outputs:
                    if not started:
                        if error := failure(self.outputs):
                            raise error
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": SSE})
                    data = await self._offload(self._delta)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            failed = failure(self.outputs)
            data = b"" if failed else self.writer.end()
        except ApiError as error:
            if not started:
                raise
            failed, data = error, self.writer.failed(error)
        if failed:
            self.log_fields["error"] = failed.message
        await send({"type": "http.response.body", "body": data})

    async def _offload(self, make: Callable[[Sequence[RequestOutput]], bytes]) -> bytes:
        weight = self.writer.weight(self.outputs) * PER_SCORE
        return await self.generation.service.offload(weight, make, self.outputs)

    def _delta(self, outputs: Sequence[RequestOutput]) -> bytes:
        return b"".join(self.writer.delta(outputs))

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[AsyncIterator[RequestOutput]]:
        """The outputs, to be read and sent within request_timeout, also by a client that does not
        read: then its sequences are aborted."""
        seconds = self.generation.service.config.request_timeout
        try:
            async with asyncio.timeout(seconds), aclosing(self.generation.outputs()) as outputs:
                yield outputs
        except TimeoutError:
            message = f"not done after {seconds:g} s, which is this server's limit"
            raise ApiError(504, message, code="timeout") from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


ANTHROPIC = "/v1/messages"
"""Where paths begin whose errors have Anthropic's shape."""


def error_response(
    error: ApiError, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    body = error.body()
    if scope["path"].startswith(ANTHROPIC):
        body = msgspec.json.encode(message_error(error, scope["request_id"]))
    more = dict(headers or {})
    if error.retry_after is not None:
        more["retry-after"] = str(error.retry_after)
    if error.status == 401:
        more["www-authenticate"] = "Bearer"
    return Response(body, error.status, more, "application/json")
