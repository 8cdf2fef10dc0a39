"""`trueline bench processes`: ranks on this CPU beside one process, and what becomes of a server
that loses one."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError
from trueline.utils.json_types import JSON


def processes(
    model: str = "mid",
    /,
    *,
    tensor_parallel_size: int = 2,
    rounds: int = 5,
    deaths: Annotated[bool, Parameter(negative=())] = False,
    streams: int = 8,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Tensor parallel ranks as processes on this CPU, beside one process with all threads, in the
    same run; and what one broadcast and one all-reduce among them cost.

    With --deaths instead: how long the clients of a server wait for their error when one of its
    ranks is killed in a step, killed while idle, or stops (engine_timeout of 5 s), and how long
    until no process of it is left.

    Parameters
    ----------
    model
        A model directory or a config that comes with the package; weights that are not there are
        drawn.
    tensor_parallel_size
        Ranks; each has its share of this machine's cores.
    rounds
        Of both, in turn; the median of their ratios is printed. Of --deaths: servers for each case.
    deaths
        Measure deaths, and nothing else.
    streams
        Of --deaths: clients, each with a stream of tokens (or, while idle, a connection).
    """
    if deaths:
        return _deaths(model, tensor_parallel_size, streams, rounds, as_json)
    from trueline.bench.models import find_bench_model
    from trueline.bench.processes import compare, exchange_costs
    from trueline.models import read_model

    path, _ = find_bench_model(model)
    hidden = read_model(path).hidden_size
    figures = {
        "exchanges": exchange_costs(tensor_parallel_size, hidden),
        "rates": compare(model, tensor_parallel_size, rounds),
    }
    if as_json:
        print(json.dumps(figures, indent=1))
        return 0
    _print(figures, tensor_parallel_size)
    return 0


def _print(figures: JSON, size: int) -> None:
    from rich import box
    from rich.table import Table

    console = tables()
    table = Table("tokens/s", "one process", f"{size} ranks", "ratio", "met", box=box.SIMPLE_HEAD)
    for row in figures["rates"]:
        table.add_row(row["what"], f"{row['one']:,.1f}", f"{row['ranks']:,.1f}",
                      f"{row['ratio']:.2f}", "yes" if row["met"] else "no")  # fmt: skip
    console.print(table)
    table = Table("exchange", "bytes", "µs", box=box.SIMPLE_HEAD)
    for row in figures["exchanges"]:
        table.add_row(row["what"], f"{row['bytes']:,}", f"{row['us']:,.0f}")
    console.print(table)


def _deaths(model: str, size: int, streams: int, rounds: int, as_json: bool) -> int:
    """1 where something is left of a server."""
    from trueline.bench.rank_deaths import measure_deaths

    if size < 2 or min(streams, rounds) < 1:
        raise UsageError(
            "--deaths takes 2 ranks or more (--tensor-parallel-size), and --streams and --rounds "
            "from 1 up"
        )
    rows = measure_deaths(model, size, streams, rounds)
    if as_json:
        print(json.dumps(rows, indent=1))
        return int(any(row["left"] for row in rows))
    from rich import box
    from rich.table import Table

    table = Table("a rank is", "clients", "error after s", "worst", "no process after s", "worst",
                  "left", box=box.SIMPLE_HEAD)  # fmt: skip
    for row in rows:
        keys = ("heard_s", "heard_worst_s", "gone_s", "gone_worst_s")
        table.add_row(row["what"], str(row["clients"]), *(f"{row[key]:.3f}" for key in keys),
                      ", ".join(row["left"]) or "nothing")  # fmt: skip
    tables().print(table)
    return int(any(row["left"] for row in rows))
