"""Load on a server from one event loop, and what every request of it saw."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from trueline.client.endpoint import Endpoint
from trueline.client.load import Load, Shape
from trueline.client.record import Record
from trueline.client.stream import ConnectionPool
from trueline.client.wire import ServerError

Report = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
T = TypeVar("T")


@dataclass(slots=True)
class LoadRun:
    """One load, measured."""

    load: Load
    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    """From the first request sent to the last answer's end."""
    cpu_seconds: float = 0.0
    """Of this process meanwhile."""


class Bench:
    def __init__(self, server: Endpoint, model: str, shape: Shape) -> None:
        self.server = server
        self.model = model
        self.shape = shape
        self.token_ids = True
        """Asked for until the server refuses."""
        self._pool = ConnectionPool(server)

    async def warm_up(self, count: int) -> None:
        """Requests that no figure counts. What the server refuses here it would always refuse."""
        try:
            await self._asked("warm-up", 0)
        except ServerError as error:
            if error.kind not in ("HTTP 400", "HTTP 422"):
                raise
            self.token_ids = False
            await self._asked("warm-up", 0)
        await asyncio.gather(*(self._asked("warm-up", number) for number in range(1, count)))

    async def run(self, load: Load, report: Report) -> LoadRun:
        run = LoadRun(load)
        plan = self._plan(load) if load.rate is not None else []
        gc.collect()
        cpu = time.process_time()
        if load.rate is None:
            await self._closed_loop(run, report)
        else:
            await self._open_loop(run, plan, report)
        run.cpu_seconds = time.process_time() - cpu
        if run.records:
            run.seconds = max(r.end for r in run.records) - min(r.start for r in run.records)
        return run

    def close(self) -> None:
        self._pool.close()

    async def _closed_loop(self, run: LoadRun, report: Report) -> None:
        load, start = run.load, time.perf_counter()
        assert load.concurrency is not None
        numbers = itertools.count() if load.limit is None else iter(range(load.limit))
        await asyncio.gather(
            *(self._worker(run, numbers, start, report) for _ in range(load.concurrency))
        )

    async def _worker(
        self, run: LoadRun, numbers: Iterator[int], start: float, report: Report
    ) -> None:
        for number in numbers:
            passed = time.perf_counter() - start
            if run.load.duration is not None and passed >= run.load.duration:
                return
            await self._one(run, self._request(run.load.name, number), 0.0)
            _tell(run, report, start)

    def _plan(self, load: Load) -> list[tuple[float, bytes]]:
        """Built ahead, so that no request is late for being built."""
        times = load.arrivals(self.shape.seed)
        return [(due, self._request(load.name, number)) for number, due in enumerate(times)]

    async def _open_loop(
        self, run: LoadRun, plan: list[tuple[float, bytes]], report: Report
    ) -> None:
        """Arrivals wait for nobody."""
        tasks = []
        start = time.perf_counter()
        for due, request in plan:
            wait = start + due - time.perf_counter()
            await asyncio.sleep(max(wait, 0.0))  # 0 too lets the loop read what has come
            task = asyncio.create_task(self._one(run, request, start + due))
            task.add_done_callback(lambda _: report(len(run.records), len(plan)))
            tasks.append(task)
        await asyncio.gather(*tasks)

    def _request(self, point: str, number: int) -> bytes:
        body = self.shape.body(self.model, point, number, self.token_ids)
        return self._pool.request("completions", body)

    async def _one(self, run: LoadRun, request: bytes, due: float) -> None:
        """Failures are figures too."""
        record = Record()
        try:
            await self._exchange(record, request)
        except ServerError as error:
            record.end = time.perf_counter()
            record.error, record.message = error.kind, self.server.hide(str(error))
        record.lag = record.start - due if due else 0.0
        run.records.append(record)

    async def _asked(self, point: str, number: int) -> None:
        try:
            await self._exchange(Record(), self._request(point, number))
        except ServerError as error:
            raise self.server.without_key(error) from error

    async def _exchange(self, record: Record, request: bytes) -> None:
        record.start = time.perf_counter()
        try:
            async with asyncio.timeout(self.server.timeout):
                await self._pool.ask(request, record)
        except TimeoutError:
            late = f"no complete answer in {self.server.timeout:g} s"
            raise ServerError("timeout", late) from None
        record.close()
        if not record.finished:
            raise ServerError("cut off", "the stream ended before the answer did")
        if record.num_tokens == 0:
            raise ServerError("empty", "an answer without tokens")


def _tell(run: LoadRun, report: Report, start: float) -> None:
    if run.load.limit is not None:
        report(len(run.records), run.load.limit)
    elif run.load.duration is not None:
        report(int(time.perf_counter() - start), int(run.load.duration))


def run_loop(work: Coroutine[object, None, T]) -> T:
    """uvloop where it is installed: less of the core for the client, more for the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
