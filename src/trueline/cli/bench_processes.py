"""`trueline bench processes`: ranks on this CPU beside one process."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables


def processes(
    model: str = "mid",
    /,
    *,
    tensor_parallel_size: int = 2,
    rounds: int = 5,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Tensor parallel ranks as processes on this CPU, beside one process with all threads, in the
    same run; and what one broadcast and one all-reduce among them cost.

    Parameters
    ----------
    model
        A model directory or a config that comes with the package; weights that are not there are
        drawn.
    tensor_parallel_size
        Ranks; each has its share of this machine's cores.
    rounds
        Of both, in turn; the median of their ratios is printed.
    """
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
    from rich import box
    from rich.table import Table

    console = tables()
    table = Table("tokens/s", "one process", f"{tensor_parallel_size} ranks", "ratio", "met",
                  box=box.SIMPLE_HEAD)  # fmt: skip
    for row in figures["rates"]:
        table.add_row(row["what"], f"{row['one']:,.1f}", f"{row['ranks']:,.1f}",
                      f"{row['ratio']:.2f}", "yes" if row["met"] else "no")  # fmt: skip
    console.print(table)
    table = Table("exchange", "bytes", "µs", box=box.SIMPLE_HEAD)
    for row in figures["exchanges"]:
        table.add_row(row["what"], f"{row['bytes']:,}", f"{row['us']:,.0f}")
    console.print(table)
    return 0
