"""`trueline bench canaries`: what canaries and poison cost."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.canaries import Cost


def canaries(
    model: str,
    /,
    *,
    batch: tuple[int, ...] = (1, 8),
    interval: tuple[int, ...] = (32, 1),
    poison: bool = True,
    rounds: int = 5,
    steps: int = 64,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """What canaries and poison cost (docs/verify.md): decode steps with them and without, in turn.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    batch
        Requests at once. May be given several times.
    interval
        Steps from one check to the next. May be given several times.
    poison
        Measure poison too.
    rounds
        Of all of them in turn, to take the medians of.
    steps
        Of each in a round.
    dtype
        Of weights and cache; auto is the config's.
    as_json
        Print the figures of every round as JSON.
    """
    if min(*batch, *interval, rounds, steps) < 1:
        raise UsageError("--batch, --interval, --rounds and --steps take numbers above 0")
    from trueline.bench.canaries import POISON, measure_canaries
    from trueline.bench.workload import bench_engine

    engine = bench_engine(
        model, max_num_seqs=max(batch), dtype=dtype, device=device, canary_interval=min(interval)
    )
    modes: list[int | str] = [*interval, *([POISON] if poison else [])]
    figures = []
    for each in batch:
        print(f"{each} requests", file=sys.stderr, flush=True)
        figures += measure_canaries(engine, each, modes, rounds, steps)
    if as_json:
        print(json.dumps([each.as_json() for each in figures], indent=1))
    else:
        _print(figures)


def _print(figures: list[Cost]) -> None:
    from statistics import median

    from rich import box
    from rich.table import Table

    heads = ("requests", "checked", "ms a step", "ratio", "lowest", "highest", "own share")
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in figures:
        ratios = (each.ratio, min(each.ratios), max(each.ratios))
        table.add_row(
            *(str(each.batch), each.mode, f"{median(each.step_ms):.2f}"),
            *(f"{ratio:.3f}" for ratio in ratios),
            f"{median(each.own):.2%}",
        )
    tables().print(table)
