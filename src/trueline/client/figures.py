"""What a run says in numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from trueline.client.load import Shape
from trueline.client.measure import LoadRun
from trueline.client.record import Record

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between the two nearest."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: mean, percentiles, largest."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    found = {"mean": math.fsum(ordered) / len(ordered)}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return found | {"max": ordered[-1]}


def summary(run: LoadRun, shape: Shape) -> dict[str, Any]:
    """Times are of requests that succeeded; throughput is of their tokens only."""
    good = [record for record in run.records if record.error is None]
    seconds = max(run.seconds, 1e-9)
    output = sum(record.num_tokens for record in good)
    prompt = sum(r.usage.prompt_tokens if r.usage else shape.prompt_len for r in good)
    late = spread([record.lag for record in run.records]) if run.load.rate else None
    return {
        "load": {"name": run.load.name, "concurrency": run.load.concurrency,
                 "rate": run.load.rate},
        "requests": len(run.records),
        "succeeded": len(good),
        "errors": _errors(run.records),
        "seconds": run.seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "mean_in_flight": sum(r.end - r.start for r in run.records) / seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": _cached(good),
        "tokens_counted_by": sorted({record.counted_by for record in good}),
        "gaps_between": "tokens" if all(r.listed_tokens for r in good) else "frames",
        "short_answers": sum(record.num_tokens != shape.output_len for record in good),
        "ttft_ms": spread([r.first - r.start for r in good if r.first is not None]),
        "itl_ms": spread([gap for record in good for gap in record.gaps]),
        "tpot_ms": spread([each for r in good if (each := _per_token(r)) is not None]),
        "e2e_ms": spread([record.end - record.start for record in good]),
        "client": {"cpu": run.cpu_seconds / seconds, "lag_ms": late},
    }  # fmt: skip


def _per_token(record: Record) -> float | None:
    """The mean of one request after its first token."""
    if record.first is None or record.num_tokens < 2:
        return None
    return (record.last - record.first) / (record.num_tokens - 1)


def _cached(records: Sequence[Record]) -> int | None:
    cached = [r.usage.cached_tokens for r in records if r.usage]
    counts = [count for count in cached if count is not None]
    return sum(counts) if counts else None


def _errors(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By kind, most first, each with its first message."""
    counts = Counter(record.error for record in records if record.error)
    first: dict[str, str] = {}
    for record in records:
        if record.error:
            first.setdefault(record.error, record.message)
    return {kind: {"count": n, "example": first[kind]} for kind, n in counts.most_common()}


def doubts(point: dict[str, Any]) -> list[str]:
    """Why a reader should not take these figures for the server's."""
    found = []
    client, ttft = point["client"], point["ttft_ms"]
    lag = client["lag_ms"]
    if lag and lag["p99"] > max(5.0, 0.1 * ttft["p50"] if ttft else 0.0):
        found.append(f"the client itself was late: p99 {lag['p99']:.1f} ms behind its schedule")
    if client["cpu"] > 0.8:
        found.append(f"the client was busy: {client['cpu']:.0%} of a core")
    if point["short_answers"]:
        found.append(f"{point['short_answers']} answers had another length than asked for")
    if (point["cached_tokens"] or 0) > 0.01 * point["prompt_tokens"]:
        share = point["cached_tokens"] / point["prompt_tokens"]
        found.append(f"{share:.0%} of the prompt tokens came from the server's cache: other --seed")
    if "frames" in point["tokens_counted_by"]:
        found.append("the server counts no tokens: every frame with text is taken for one")
    elif point["gaps_between"] == "frames":
        found.append("the server lists no token ids: itl is between frames with text")
    return found
