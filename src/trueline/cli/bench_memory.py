"""`trueline bench memory`: host memory while files of stored formats are loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError


def memory(
    *,
    model: tuple[str, ...] = ("v32s", "k25s"),
    layers: int = 2,
    directory: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Host memory while a checkpoint of some gigabytes is loaded, which is written for it and
    deleted afterwards. Accepted: the loaded weights (on a GPU, nothing), the largest file and
    1 GiB.

    Parameters
    ----------
    model
        v2lite and v32s in block fp8, k25s with int4 experts. May be given several times.
    layers
        To cut the model to: its first ones, one of which is dense.
    directory
        Where the checkpoint is written; if not given, where temporary files are.
    as_json
        Print the figures as JSON.
    """
    from rich import box
    from rich.table import Table

    from trueline.bench.formats import PUBLISHED
    from trueline.bench.memory import measure_load

    for name in model:
        if name not in PUBLISHED:
            raise UsageError(f"--model {name}: accepted: {', '.join(PUBLISHED)}")
    if layers < 1:
        raise UsageError("--layers takes a number from 1 up")
    found = [measure_load(name, PUBLISHED[name], layers, directory, _say) for name in model]
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
        return int(not all(each.met for each in found))
    heads = ("model", "format", "layers", "device", "files GB", "largest", "loaded GB", "peak GB",
             "accepted", "met", "s")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in found:
        sizes = (each.checkpoint_bytes, each.largest_file, each.loaded_bytes, each.peak_bytes,
                 each.limit)  # fmt: skip
        table.add_row(
            *(each.model, each.format, str(each.layers), each.device),
            *(f"{size / 1e9:.2f}" for size in sizes),
            *("yes" if each.met else "no", f"{each.seconds:.0f}"),
        )
    tables().print(table)
    return int(not all(each.met for each in found))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
