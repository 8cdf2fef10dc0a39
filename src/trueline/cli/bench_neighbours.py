"""`trueline bench neighbours`: what decode keeps while other programs use the cores."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.neighbours import Beside


def neighbours(
    model: str,
    /,
    *,
    batch: tuple[int, ...] = (1, 8),
    neighbours: int | None = None,
    rounds: int = 5,
    seconds: float = 2.0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Decode rates alone and beside busy processes, which the command starts itself.

    The same requests decode on through phases with and without them, in turn. Two programs that
    share the cores have half of them each, so 0.5 is fair.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    batch
        Requests at once. May be given several times.
    neighbours
        Busy processes, each kept on a core; one for every core unless given.
    rounds
        Pairs of phases to take the medians of.
    seconds
        How long a phase is.
    dtype
        Of weights and cache; auto is the config's.
    as_json
        Print the figures of every round as JSON.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("bench neighbours: needs Linux, where a process can be kept on a core")
    count = len(os.sched_getaffinity(0)) if neighbours is None else neighbours
    if min(*batch, count, rounds) < 1 or seconds <= 0:
        raise UsageError("--batch, --neighbours, --rounds and --seconds take numbers above 0")
    from trueline.bench import neighbours as beside
    from trueline.bench.workload import bench_engine

    engine = bench_engine(model, max_num_seqs=max(batch), dtype=dtype)
    figures = []
    with beside.start_neighbours(count) as started:
        for each in batch:
            figures.append(beside.measure_beside(engine, each, started, rounds, seconds))
            print(_line(figures[-1]), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps([each.as_json() for each in figures], indent=1))
    else:
        _print(figures)


def _line(figures: Beside) -> str:
    rates = ", ".join(f"{each.alone:.1f} and {each.beside:.1f}" for each in figures.rounds)
    return f"{figures.batch} requests, tokens/s alone and beside: {rates}"


def _print(figures: list[Beside]) -> None:
    from rich import box
    from rich.table import Table

    heads = ("requests", "neighbours", "alone tokens/s", "beside them", "ratio", "lowest",
             "highest")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in figures:
        ratios = [one.ratio for one in each.rounds]
        numbers = (each.alone_tokens_per_s, each.beside_tokens_per_s)
        table.add_row(
            *(str(each.batch), str(each.neighbours)),
            *(f"{number:.1f}" for number in numbers),
            *(f"{ratio:.2f}" for ratio in (each.ratio, min(ratios), max(ratios))),
        )
    tables().print(table)
