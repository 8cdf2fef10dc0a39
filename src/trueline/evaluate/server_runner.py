"""Generates on any server that speaks OpenAI's protocol: so many requests in flight."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Iterator, Sequence

import msgspec

from trueline.client.endpoint import Endpoint
from trueline.client.measure import run_loop
from trueline.client.stream import ConnectionPool
from trueline.client.wire import ServerError, read_chunk, status_error
from trueline.engine.params import SamplingParams
from trueline.errors import UsageError, described
from trueline.evaluate.run import EvalOutput, EvalRequest, Report
from trueline.utils.json_types import JSON

BUSY = (429, 503)
ATTEMPTS = 8
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds before a busy server is asked again; each time twice as many."""
FAILED = ("error", "abort")
"""Finish reasons of an answer that the server gave up: ours, vLLM's and SGLang's."""
ALWAYS_SENT = ("temperature", "top_p", "max_tokens")
"""The rest only where it is given: not every server knows every field."""


class WholeResponse:
    """An answer that is not streamed, as a connection reads it (`client.stream.Sink`)."""

    def __init__(self) -> None:
        self.status = 0
        self.reason = ""
        self.retry_after: str | None = None
        self.body = b""

    def head(self, status: int, reason: str, headers: dict[bytes, bytes]) -> None:
        wait = headers.get(b"retry-after")
        self.status, self.reason = status, reason
        self.retry_after = wait.decode(errors="replace") if wait else None

    def data(self, chunk: bytes) -> None:
        self.body += chunk

    def wait_seconds(self, attempt: int) -> float:
        """As the server asks, else longer each time; spread, so that not all come at once."""
        try:
            asked = float(self.retry_after or "")
        except ValueError:  # a date, or none
            asked = math.nan
        if math.isnan(asked):
            asked = FIRST_WAIT * 2**attempt
        return min(max(asked, 0.0), LONGEST_WAIT) * random.uniform(1.0, 1.25)


class ServerRunner:
    def __init__(
        self,
        server: Endpoint,
        model: str,
        concurrency: int = 64,
        template_kwargs: JSON | None = None,
        sent: Collection[str] = (),
    ) -> None:
        """`sent`: sampling parameters that are sent even where they have our default."""
        if concurrency < 1:
            raise UsageError(f"--concurrency {concurrency}: accepted: numbers from 1 up")
        self.server = server
        self.model = model
        self.concurrency = concurrency
        self.template_kwargs = template_kwargs or {}
        self.sent = {*ALWAYS_SENT, *sent}

    def run(self, requests: Sequence[EvalRequest], report: Report) -> None:
        run_loop(self._run(requests, report))

    def plan_lines(self) -> list[str]:
        return []

    async def _run(self, requests: Sequence[EvalRequest], report: Report) -> None:
        pool = ConnectionPool(self.server)
        due = iter(requests)
        count = min(self.concurrency, len(requests))
        try:
            await asyncio.gather(*(self._work(pool, due, report) for _ in range(count)))
        finally:
            pool.close()

    async def _work(self, pool: ConnectionPool, due: Iterator[EvalRequest], report: Report) -> None:
        for request in due:
            try:
                output = await self._answer(pool, request)
            except ServerError as error:
                output = EvalOutput(error=self.server.hide(f"{error.kind}: {error}"))
            except Exception as error:  # an answer that nobody foresaw: other requests go on
                output = EvalOutput(error=self.server.hide(described(error)))
            report(request, output)

    async def _answer(self, pool: ConnectionPool, request: EvalRequest) -> EvalOutput:
        path = "completions" if isinstance(request.prompt, str) else "chat/completions"
        content = pool.request(path, msgspec.json.encode(self._body(request)))
        for attempt in range(ATTEMPTS):
            response = WholeResponse()
            try:
                async with asyncio.timeout(self.server.timeout):
                    await pool.ask(content, response)
            except TimeoutError:
                late = f"no complete answer in {self.server.timeout:g} s"
                raise ServerError("timeout", late) from None
            if response.status not in BUSY or attempt == ATTEMPTS - 1:
                break
            await asyncio.sleep(response.wait_seconds(attempt))
        return _read(response)

    def _body(self, request: EvalRequest) -> JSON:
        body: JSON = {"model": self.model, **_sampling_fields(request.params, self.sent)}
        if isinstance(request.prompt, str):
            return body | {"prompt": request.prompt}
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        return body | {"messages": request.prompt}


def _sampling_fields(params: SamplingParams, sent: Collection[str]) -> JSON:
    default = SamplingParams()
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    return {
        name: value
        for name, value in given.items()
        if value is not None and (name in sent or value != getattr(default, name))
    }


def _read(response: WholeResponse) -> EvalOutput:
    if response.status != 200:
        raise status_error(response.status, response.reason, response.body, response.retry_after)
    chunk = read_chunk(response.body)
    if not chunk.choices:
        raise ServerError("not understood", "an answer without choices")
    (choice, *_), usage = chunk.choices, chunk.usage
    if choice.finish_reason in FAILED:
        raise ServerError("not finished", f"the server ended it with {choice.finish_reason!r}")
    return EvalOutput(
        text=choice.answer,
        reasoning=choice.thought or None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        generated_tokens=usage.completion_tokens if usage else 0,
        finish_reason=choice.finish_reason or "unknown",
    )
