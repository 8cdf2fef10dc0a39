"""`trueline bench grammars`: what structured output costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.grammars import GrammarCost


def grammars(
    model: str,
    /,
    *,
    streams: tuple[int, ...] = (32,),
    arrivals: tuple[int, ...] = (0,),
    rounds: int = 5,
    steps: int = 48,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """What structured output costs: the same streams, half of them with a JSON schema of their own
    and without, in turn.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn). Its vocabulary is a stand-in.
    streams
        Requests at once. May be given several times.
    arrivals
        Steps from one request that ends, and another that comes with a schema not seen before, to
        the next; 0: none. May be given several times.
    rounds
        Pairs of phases to take the medians of.
    steps
        Of a phase.
    dtype
        Of weights and cache; auto is the config's.
    as_json
        Print the figures of every phase as JSON.
    """
    if min(*streams, rounds, steps) < 2 or min(arrivals) < 0:
        raise UsageError("--streams, --rounds and --steps take numbers above 1, --arrivals from 0")
    from trueline.bench.grammars import measure_grammars
    from trueline.bench.workload import bench_engine

    engine = bench_engine(model, max_num_seqs=max(streams), dtype=dtype, device=device)
    found = [
        (each, measure_grammars(engine, count, rounds, steps, each))
        for count in streams
        for each in arrivals
    ]
    if as_json:
        print(json.dumps([cost.as_json() | {"arrivals": each} for each, cost in found], indent=1))
    else:
        _print(found)


def _print(found: list[tuple[int, GrammarCost]]) -> None:
    from statistics import median

    from rich import box
    from rich.table import Table

    heads = ("streams", "a new one every", "tokens/s without", "half with", "ratio", "lowest",
             "highest", "CPU", "p99 ms without", "half with", "ratio", "masks ms a step",
             "ms a schema")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for arrivals, cost in found:
        ratios = cost.throughput_ratios
        without, half = cost.p99_ms
        table.add_row(
            *(str(cost.streams), f"{arrivals} steps" if arrivals else "–"),
            *(f"{median(p.tokens_per_s for p in each):.1f}" for each in (cost.without, cost.half)),
            *(f"{ratio:.3f}" for ratio in (median(ratios), min(ratios), max(ratios))),
            f"{cost.cpu_ratio:.3f}",
            *(f"{without:.2f}", f"{half:.2f}", f"{half / without:.3f}"),
            f"{median(phase.masks_ms for phase in cost.half):.2f}",
            f"{cost.compile_ms:.1f}",
        )
    tables().print(table)
