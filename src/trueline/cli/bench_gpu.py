"""`trueline bench gpu`: models and kernels on this GPU, beside recorded peers and the roofline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from trueline.cli.bench_gpu_tables import print_exchange, print_formats, print_models
from trueline.utils.json_types import JSON

MODELS = ("v2lite", "ling25s", "v32s")
KERNELS = ("attention", "lightning", "experts")
Model = Literal["v2lite", "ling25s", "v32s", "k25s", "v4s"]
Part = Literal["models", "kernels", "formats", "format-kernels", "exchange"]
PARTS: tuple[Part, ...] = ("models", "kernels", "formats", "format-kernels")


def gpu(
    *,
    only: tuple[Part, ...] = PARTS,
    model: tuple[Model, ...] = ("v2lite", "ling25s", "v32s", "k25s", "v4s"),
    out: Path | None = None,
    plot: Path | None = None,
    recorded: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Decode, prefill and start-up of models with random weights on this GPU, and their kernels:
    in bfloat16, beside the figures of peers on an H200; and in stored formats, beside bfloat16 in
    the same run. All with the roofline that memory sets. models and kernels take four minutes.

    Parameters
    ----------
    only
        Parts to measure; may be given several times. models and kernels: bfloat16, beside peers;
        formats: v2lite and v32s in block fp8, k25s with int4 experts, v4s with fp4 experts and
        block fp8, each beside bfloat16;
        format-kernels: GEMMs and experts on weights in these formats; exchange: v2lite with
        NCCL's collectives in its captured steps, at one rank, and without. Default: all but the
        last.
    model
        Which of them; may be given several times.
    out
        Write all figures to this JSON file, kernels of every step included.
    plot
        Draw the decode cells into this file (.svg or .png).
    recorded
        Measure nothing: take the figures of such a JSON file.
    """
    from trueline.bench.gpu import format_report, report

    if recorded is not None:
        before = json.loads(recorded.read_text())
        measured = {key: before.get(key, []) for key in MEASURED}
    else:
        measured = _measure_parts(only, model)
    failed = any(None in found for found in measured.values())
    measured = {key: [each for each in found if each] for key, found in measured.items()}
    peers, found, formats = report.peers(), measured["models"], measured["formats"]
    figures = measured | {
        "kernel_cells": report.kernel_rows(measured["kernels"]),
        "decode": report.decode_rows(found, peers),
        "prefill": report.prefill_rows(found, peers),
        "start": report.start_rows(found, peers),
        "format_decode": format_report.decode_rows(formats),
        "format_prefill": format_report.prefill_rows(formats),
        "format_memory": format_report.memory_rows(formats),
    }
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))
    if plot is not None:
        report.plot(figures["decode"], figures["format_decode"], plot)
    if as_json:
        print(json.dumps(figures, indent=1))
    else:
        print_models(figures)
        print_formats(figures)
        print_exchange(figures["exchange"])
    return int(failed or any("error" in cell for key in CELLS for cell in figures[key]))


MEASURED = ("models", "kernels", "formats", "format_kernels", "exchange")
CELLS = ("decode", "prefill", "format_decode", "format_prefill", "format_kernels")


def _measure_parts(only: Sequence[Part], names: Sequence[str]) -> dict[str, list[JSON | None]]:
    """By the keys of MEASURED; None for what has failed."""
    from trueline.bench.formats import PUBLISHED

    found: dict[str, list[JSON | None]] = {key: [] for key in MEASURED}
    if "kernels" in only:
        for kind in KERNELS:
            found["kernels"] += _kernels(kind, "--engine")
    if "models" in only:
        found["models"] += [_measure(name) for name in names if name in MODELS]
    if "formats" in only:
        for name in names:
            if name in PUBLISHED:
                found["formats"] += [_measure(name, form) for form in ("bfloat16", PUBLISHED[name])]
    if "format-kernels" in only:
        found["format_kernels"] += _kernels("formats")
    if "exchange" in only:
        found["exchange"] += _exchange()
    return found


def _exchange() -> list[JSON | None]:
    print("measuring captured exchanges", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "trueline.bench.gpu.exchange", "v2lite"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    rows: list[JSON | None] = (
        [None] if done.returncode else json.loads(done.stdout.splitlines()[-1])
    )
    return rows


def _measure(*what: str) -> JSON | None:
    """A model, and its format. In a process of its own: start-up counts, and memory comes back."""
    print("measuring", *what, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "trueline.bench.gpu.end_to_end", *what, repr(time.time())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(*what, "failed; its words are above", file=sys.stderr, flush=True)
        return None
    result: JSON = json.loads(done.stdout.splitlines()[-1])
    return result


def _kernels(name: str, *options: str) -> list[JSON | None]:
    """As the engine launches them; some modules have other ways too."""
    print(f"timing kernels: {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "cells.json"
        module = f"trueline.bench.gpu.kernels.{name}"
        command = [sys.executable, "-m", module, *options, "--out", str(out)]
        subprocess.run(command, stdout=sys.stderr, check=False)
        cells: list[JSON | None] = json.loads(out.read_text()) if out.exists() else [None]
    return cells
