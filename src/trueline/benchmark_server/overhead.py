"""Rounds of offline and server in turn, and what the two come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trueline.benchmark_server.processes import Offline, Served
from trueline.client.endpoint import endpoint
from trueline.client.load import Load, Shape
from trueline.client.measure import Bench, Run
from trueline.client.wire import ServerError


@dataclass(frozen=True, slots=True)
class Side:
    """One run of one of the two."""

    tokens_per_s: float
    """Generated, from the first request's start to the last answer's end."""
    first_token_s: float
    """Until the last of the requests has its first."""


@dataclass(frozen=True, slots=True)
class Pair:
    streams: int
    offline: Side
    server: Side

    @property
    def ratio(self) -> float:
        return self.server.tokens_per_s / self.offline.tokens_per_s


async def measure_rounds(
    offline: Offline,
    served: Served,
    shape: Shape,
    streams: Sequence[int],
    repeats: int,
    told: Callable[[Pair], None],
) -> list[Pair]:
    """Both are loaded, one works. They change places from round to round: a machine that gets
    slower or faster meanwhile favours neither."""
    server = endpoint(served.url)
    bench = Bench(server, server.pick_model(None), shape)
    bench.token_ids = False  # frames as most clients ask for them
    pairs = []
    try:
        await _warm_up(offline, bench, max(streams))
        for number in range(repeats):
            for count in streams:
                pair = await _pair(offline, bench, count, server_first=number % 2 == 1)
                told(pair)
                pairs.append(pair)
    finally:
        bench.close()
    return pairs


async def _warm_up(offline: Offline, bench: Bench, streams: int) -> None:
    short = Shape(min(bench.shape.prompt_len, 16), 2, bench.shape.vocab_size, bench.shape.seed)
    shape, bench.shape = bench.shape, short
    await _offline(offline, short, streams)
    await _server(bench, streams)
    bench.shape = shape


async def _pair(offline: Offline, bench: Bench, streams: int, *, server_first: bool) -> Pair:
    if server_first:
        through = await _server(bench, streams)
        return Pair(streams, await _offline(offline, bench.shape, streams), through)
    alone = await _offline(offline, bench.shape, streams)
    return Pair(streams, alone, await _server(bench, streams))


async def _offline(offline: Offline, shape: Shape, streams: int) -> Side:
    prompts = [shape.prompt(_load(streams).name, number) for number in range(streams)]
    found = await asyncio.to_thread(offline.measure, prompts, shape.output_len)
    return Side(streams * shape.output_len / found["total_s"], found["first_token_s"])


async def _server(bench: Bench, streams: int) -> Side:
    run = await bench.run(_load(streams), lambda done, of: None)
    return server_side(run, bench.shape.output_len)


def _load(streams: int) -> Load:
    return Load(concurrency=streams, num_requests=streams)


def server_side(run: Run, output_len: int) -> Side:
    """Only of a run in which every request has got all that was asked for."""
    first = []
    for record in run.records:
        if record.error is not None:
            raise ServerError(record.error, record.message)
        if record.num_tokens != output_len or record.first is None:
            raise ServerError(
                "short", f"an answer of {record.num_tokens} tokens instead of {output_len}"
            )
        first.append(record.first - record.start)
    return Side(len(first) * output_len / run.seconds, max(first))


def summarise(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """For every number of streams the medians; the ratio's is that of the rounds' ratios, whose
    two sides were measured right after each other."""
    rows = []
    for streams in dict.fromkeys(pair.streams for pair in pairs):
        rounds = [pair for pair in pairs if pair.streams == streams]
        ratios = [pair.ratio for pair in rounds]
        rows.append({
            "streams": streams,
            "rounds": len(rounds),
            "offline_tokens_per_s": median(pair.offline.tokens_per_s for pair in rounds),
            "server_tokens_per_s": median(pair.server.tokens_per_s for pair in rounds),
            "ratio": median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "offline_first_token_s": median(pair.offline.first_token_s for pair in rounds),
            "server_first_token_s": median(pair.server.first_token_s for pair in rounds),
        })  # fmt: skip
    return rows
