"""`trueline bench memory`: what loading files of stored formats takes, whole and on ranks."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError


def memory(
    *,
    model: tuple[str, ...] = ("v32s", "k25s"),
    layers: int = 2,
    tensor_parallel_size: int = 1,
    enable_expert_parallel: Annotated[bool, Parameter(negative=())] = False,
    directory: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Host memory, bytes read and time while a checkpoint of some gigabytes is loaded, whole and by
    each of several ranks, one after the other; it is written for it and deleted afterwards.
    Accepted: the loaded weights (on a GPU, nothing), the largest file and 1 GiB; read from storage,
    the pages that hold the rank's slices, and what the system reads ahead.

    Parameters
    ----------
    model
        v2lite and v32s in block fp8, k25s with int4 experts, v4s with fp4 experts. May be given
        several times.
    layers
        To cut the model to: its first ones, one of which is dense; of v4s the last ones, which
        compress.
    tensor_parallel_size
        Ranks.
    enable_expert_parallel
        Routed experts whole, some on each rank; else each of them by width.
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
    if tensor_parallel_size < 1:
        raise UsageError("--tensor-parallel-size takes a number from 1 up")
    load = partial(
        measure_load,
        layers=layers,
        directory=directory,
        say=_say,
        ranks=tensor_parallel_size,
        expert_parallel=enable_expert_parallel,
    )
    found = [each for name in model for each in load(name, PUBLISHED[name])]
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
        return int(not all(each.met for each in found))
    heads = ("model", "format", "layers", "device", "files GB", "largest", "rank", "held", "pages",
             "read", "loaded", "peak", "accepted", "met", "s")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in found:
        one = each.load
        held = (one.slice_bytes, one.page_bytes)
        grown = (one.loaded_bytes, one.peak_bytes, each.limit)
        table.add_row(
            *(each.model, each.format, str(each.layers), one.device),
            *(_gb(size) for size in (each.checkpoint_bytes, each.largest_file)),
            f"{one.rank} of {one.size}",
            *(_gb(size) for size in held),
            "not known" if one.read_bytes is None else _gb(one.read_bytes),
            *(_gb(size) for size in grown),
            *("yes" if each.met else "no", f"{one.seconds:.0f}"),
        )
    tables().print(table)
    if any(each.cached for each in found):
        _say("less was read from storage than is held: the files could not be put out of the cache")
    return int(not all(each.met for each in found))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
