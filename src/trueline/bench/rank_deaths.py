"""How long clients wait for their error when a rank of their server dies or stops, and how long
until nothing is left of that server. Every round has a server of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from trueline.bench.models import find_bench_model
from trueline.bench.overhead.processes import SECONDS_TO_END, Served
from trueline.client.endpoint import Endpoint, endpoint
from trueline.client.load import Shape
from trueline.client.measure import run_loop
from trueline.client.record import Record
from trueline.client.stream import ConnectionPool
from trueline.client.wire import ServerError
from trueline.errors import EngineBroken
from trueline.models import read_model
from trueline.tiny.tokenizer import write_word_tokenizer
from trueline.utils.environment import (
    child_processes,
    environment_with_temp,
    listening_sockets,
    open_sockets,
    shared_memory,
)
from trueline.utils.json_types import JSON

SHAPE = (32, 2000)
"""Tokens of a prompt, and of an answer that is not over when the rank dies."""
SECONDS_OF_DECODE = 0.5
"""After all streams have begun: the rank dies somewhere in these."""
ENGINE_TIMEOUT = 5.0
"""Seconds, where a rank is to be found that stops: more than a step takes on a busy machine."""


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    number: signal.Signals
    streams: bool
    """Whether a step runs; else clients only keep their connections open."""
    words: str
    """Of the error of every stream."""
    flags: tuple[str, ...] = ()


CASES = (
    Case("killed in a step", signal.SIGKILL, True, r"rank \d+ was killed by SIGKILL"),
    Case("killed while idle", signal.SIGKILL, False, ""),
    Case(f"stopped in a step, engine_timeout {ENGINE_TIMEOUT:g} s", signal.SIGSTOP, True,
         r"engine_timeout\): .*rank \d+", ("--engine-timeout", str(ENGINE_TIMEOUT))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Death:
    """Seconds after the signal."""

    heard: list[float]
    """Until each client had its error, or saw its idle connection closed."""
    gone: float
    """Until the last process of the server had ended."""
    left: list[str]
    """What was there then nevertheless: ports, shared memory, temporary files."""


def measure_deaths(model: str, size: int, streams: int, rounds: int) -> list[JSON]:
    """A row for every case, printed on stderr when it is known."""
    rows: list[JSON] = []
    for case in CASES:
        deaths = [_one(model, size, streams, case, round_) for round_ in range(rounds)]
        rows.append(summarise(case.what, deaths))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def summarise(what: str, deaths: list[Death]) -> JSON:
    heard = [seconds for death in deaths for seconds in death.heard]
    gone = [death.gone for death in deaths]
    return {
        "what": what,
        "clients": len(heard),
        "heard_s": median(heard),
        "heard_worst_s": max(heard),
        "gone_s": median(gone),
        "gone_worst_s": max(gone),
        "left": sorted({each for death in deaths for each in death.left}),
    }


def _one(model: str, size: int, streams: int, case: Case, seed: int) -> Death:
    directory, has_weights = find_bench_model(model)
    vocab_size = read_model(directory).vocab.total
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("tokenizer", "temp"):
            Path(scratch, name).mkdir()
        write_word_tokenizer(Path(scratch, "tokenizer"), vocab_size)
        options = {"tensor_parallel_size": size, "max_num_seqs": streams}
        more = ["--tokenizer", f"{scratch}/tokenizer", "--on-engine-death", "exit", *case.flags]
        more += [] if has_weights else ["--load-format", "dummy"]
        shared = shared_memory()
        temp = Path(scratch, "temp")
        served = Served(
            str(directory), options, *more, environment=environment_with_temp(str(temp))
        )
        try:
            served.wait()
            clients = Clients(endpoint(served.url), Shape(*SHAPE, vocab_size, seed), streams, case)
            death = run_loop(_watched(clients, served.process.pid, size))
            left = [*death.left, *sorted(shared_memory() - shared), *os.listdir(temp)]
            return Death(death.heard, death.gone, left)
        finally:
            served.process.kill()
            served.process.wait(SECONDS_TO_END)


async def _watched(clients: Clients, server: int, size: int) -> Death:
    """Kills or stops one of the ranks, and waits for everything that follows."""
    waiting = await clients.start()
    (engine,) = child_processes(server)
    ranks = child_processes(engine)
    if len(ranks) != size - 1:
        raise EngineBroken(f"{size} ranks, but {len(ranks)} processes besides rank 0's")
    processes = [server, engine, *ranks]
    listening = set[str]().union(*map(open_sockets, processes)) & listening_sockets()
    with ExitStack() as opened:
        ends = [_ended(pid, opened) for pid in processes]
        await asyncio.sleep(random.Random(clients.shape.seed).uniform(0.0, SECONDS_OF_DECODE))
        start = time.perf_counter()
        os.kill(ranks[-1], clients.case.number)
        heard = await asyncio.gather(*waiting)
        gone = await asyncio.gather(*ends)
    ports = [f"socket {each}" for each in sorted(listening & listening_sockets())]
    return Death([each - start for each in heard], max(gone) - start, ports)


def _ended(pid: int, opened: ExitStack) -> asyncio.Future[float]:
    """When it does."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[float] = loop.create_future()
    descriptor = os.pidfd_open(pid)
    opened.callback(os.close, descriptor)

    def readable() -> None:
        loop.remove_reader(descriptor)
        ended.set_result(time.perf_counter())

    loop.add_reader(descriptor, readable)
    return ended


class Clients:
    """As many as there are streams; each tells when it heard that the server is lost."""

    def __init__(self, server: Endpoint, shape: Shape, streams: int, case: Case) -> None:
        self.server, self.shape, self.streams, self.case = server, shape, streams, case
        self._pool = ConnectionPool(server)
        self._model = server.pick_model(None)

    async def start(self) -> list[Awaitable[float]]:
        """When all have their first tokens, or are connected."""
        if not self.case.streams:
            return [await self._connected() for _ in range(self.streams)]
        records = [Record() for _ in range(self.streams)]
        waiting = [asyncio.create_task(self._stream(each, i)) for i, each in enumerate(records)]
        while any(each.first is None for each in records):
            for each in waiting:
                if each.done():
                    each.result()
                    raise ServerError("short", "an answer was over before the last had begun")
            await asyncio.sleep(0.01)
        return list[Awaitable[float]](waiting)

    async def _stream(self, record: Record, number: int) -> float:
        body = self.shape.body(self._model, "deaths", number, token_ids=False)
        try:
            await self._pool.ask(self._pool.request("completions", body), record)
            record.close()
        except ServerError as error:
            if re.search(self.case.words, str(error)) is None:
                raise
            return time.perf_counter()
        raise ServerError(
            "no error", f"{self.case.what}: a stream ended as if nothing had happened"
        )

    async def _connected(self) -> Awaitable[float]:
        address = urlsplit(self.server.base)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)

        async def closed() -> float:
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            return time.perf_counter()

        return asyncio.create_task(closed())
