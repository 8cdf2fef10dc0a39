"""Alternating rounds of offline and server, and their summary."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from trueline.bench.overhead.machine import CpuMeter, CpuUse
from trueline.bench.overhead.processes import Offline, Served
from trueline.client.endpoint import endpoint
from trueline.client.load import Load, Shape
from trueline.client.measure import Bench, LoadRun
from trueline.client.wire import ServerError
from trueline.utils.environment import child_processes
from trueline.utils.json_types import JSON

QUIET = 0.05
"""Cores that others may use in a round that counts."""
TRIES = 3
"""Rounds to make for every one asked for, where others use the machine."""
CALM_SECONDS, PATIENCE = 0.5, 30
"""Before a pair: how long nobody must have used it, and how often that is tried."""


@dataclass(frozen=True, slots=True)
class Side:
    """One run of one of the two."""

    total_s: float
    """From the first request's start to the last answer's end."""
    first_token_s: float
    """Until the last of the requests has its first."""
    use: CpuUse = CpuUse()  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Pair:
    streams: int
    output_len: int
    offline: Side
    server: Side

    def rate(self, side: Side) -> float:
        """Generated tokens a second."""
        return self.streams * self.output_len / side.total_s

    def decode_rate(self, side: Side) -> float:
        """After all the first ones."""
        return self.streams * (self.output_len - 1) / max(side.total_s - side.first_token_s, 1e-9)

    @property
    def ratio(self) -> float:
        return self.rate(self.server) / self.rate(self.offline)

    @property
    def decode_ratio(self) -> float:
        return self.decode_rate(self.server) / self.decode_rate(self.offline)

    @property
    def is_quiet(self) -> bool:
        return max(self.offline.use.others, self.server.use.others) <= QUIET


class Overhead:
    """Both are loaded, one works."""

    def __init__(self, offline: Offline, served: Served, shape: Shape) -> None:
        server = endpoint(served.url)
        self.offline, self.shape = offline, shape
        self.bench = Bench(server, server.pick_model(None), shape)
        self.bench.token_ids = False  # chunks as most clients ask for them
        self.processes = {"client": os.getpid(), "offline": offline.process.pid,
                          "front end": served.process.pid}  # fmt: skip
        self.processes |= zip(["engine"], child_processes(served.process.pid), strict=False)

    async def rounds(
        self, streams: Sequence[int], repeats: int, report: Callable[[Pair], None]
    ) -> list[Pair]:
        """Until each number of streams has `repeats` quiet ones, or TRIES times that. The two
        change places from round to round: a machine that gets slower or faster meanwhile favours
        neither."""
        pairs: list[Pair] = []
        try:
            await self._warm_up(max(streams))
            for number in range(TRIES * repeats):
                for count in streams:
                    if sum(each.is_quiet for each in pairs if each.streams == count) < repeats:
                        await self._calm()
                        pairs.append(await self._pair(count, server_first=number % 2 == 1))
                        report(pairs[-1])
        finally:
            self.bench.close()
        return pairs

    async def _calm(self) -> None:
        """Also gives threads of the run before time to fall asleep."""
        for _ in range(PATIENCE):
            meter = CpuMeter(self.processes)
            await asyncio.sleep(CALM_SECONDS)
            if meter.stop().others <= QUIET:
                return

    async def _warm_up(self, streams: int) -> None:
        shape = self.shape
        short = Shape(min(shape.prompt_len, 16), 2, shape.vocab_size, shape.seed)
        self.shape = self.bench.shape = short
        await self._pair(streams, server_first=False)
        self.shape = self.bench.shape = shape

    async def _pair(self, streams: int, *, server_first: bool) -> Pair:
        if server_first:
            through = await self._through_server(streams)
            alone = await self._offline(streams)
        else:
            alone = await self._offline(streams)
            through = await self._through_server(streams)
        return Pair(streams, self.shape.output_len, alone, through)

    async def _offline(self, streams: int) -> Side:
        prompts = [self.shape.prompt(_load(streams).name, number) for number in range(streams)]
        meter = CpuMeter(self.processes)
        found = await asyncio.to_thread(self.offline.measure, prompts, self.shape.output_len)
        return Side(found["total_s"], found["first_token_s"], meter.stop())

    async def _through_server(self, streams: int) -> Side:
        meter = CpuMeter(self.processes)
        run = await self.bench.run(_load(streams), lambda done, of: None)
        return server_side(run, self.shape.output_len, meter.stop())


def _load(streams: int) -> Load:
    return Load(concurrency=streams, num_requests=streams)


def server_side(run: LoadRun, output_len: int, use: CpuUse) -> Side:
    """Only of a run in which every request has got all that was asked for."""
    first = []
    for record in run.records:
        if record.error is not None:
            raise ServerError(record.error, record.message)
        if record.num_tokens != output_len or record.first is None:
            raise ServerError(
                "short", f"an answer of {record.num_tokens} tokens instead of {output_len}"
            )
        first.append(record.first)
    return Side(run.seconds, max(first) - min(record.start for record in run.records), use)


def summarise(pairs: Sequence[Pair]) -> list[JSON]:
    """For every number of streams the medians of its quiet rounds (of all, where none was). The
    ratio's is that of the rounds' ratios, whose two sides were measured right after each other."""
    rows = []
    for streams in dict.fromkeys(pair.streams for pair in pairs):
        rounds = [pair for pair in pairs if pair.streams == streams]
        quiet = [pair for pair in rounds if pair.is_quiet]
        used = quiet or rounds
        ratios = [pair.ratio for pair in used]
        rows.append({
            "streams": streams,
            "rounds": len(rounds),
            "quiet_rounds": len(quiet),
            "offline_tokens_per_s": median(pair.rate(pair.offline) for pair in used),
            "server_tokens_per_s": median(pair.rate(pair.server) for pair in used),
            "ratio": median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "decode_ratio": median(pair.decode_ratio for pair in used),
            "offline_first_token_s": median(pair.offline.first_token_s for pair in used),
            "server_first_token_s": median(pair.server.first_token_s for pair in used),
            "us_per_token": {
                name: median(_us_per_token(pair, name) for pair in used)
                for name in used[0].server.use.ours
            },
        })  # fmt: skip
    return rows


def _us_per_token(pair: Pair, process: str) -> float:
    """Of processor time, through the server."""
    seconds = pair.server.use.ours[process] * pair.server.total_s
    return seconds * 1e6 / (pair.streams * pair.output_len)
