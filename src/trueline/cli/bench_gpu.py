"""`trueline bench gpu`: models and kernels on this GPU, beside recorded peers and the roofline."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.utils.json_types import JSON

MODELS = ("v2lite", "ling25s", "v32s")
KERNELS = ("attention", "lightning", "experts")


def gpu(
    *,
    model: tuple[str, ...] = MODELS,
    out: Path | None = None,
    plot: Path | None = None,
    recorded: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Decode, prefill and start-up of three models with random weights on this GPU, beside the
    figures of peers on an H200 and the roofline that memory sets. Takes about five minutes.

    Parameters
    ----------
    model
        Which of them; may be given several times.
    out
        Write all figures to this JSON file, kernels of every step included.
    plot
        Draw the decode cells into this file (.svg or .png).
    recorded
        Measure nothing: take the figures of such a JSON file.
    """
    from trueline.bench.gpu import report

    if recorded is not None:
        before = json.loads(recorded.read_text())
        found, kernels = before["models"], before["kernels"]
    else:
        kernels = [cell for name in KERNELS for cell in _kernels(name)]
        found = [result for name in model if (result := _measure(name))]
    peers = report.peers()
    figures = {
        "models": found,
        "kernels": kernels,
        "kernel_cells": report.kernel_rows(kernels),
        "decode": report.decode_rows(found, peers),
        "prefill": report.prefill_rows(found, peers),
        "start": report.start_rows(found, peers),
    }
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))
    if plot is not None:
        report.plot(figures["decode"], plot)
    print(json.dumps(figures, indent=1)) if as_json else _print(figures)
    cells = figures["decode"] + figures["prefill"]
    failed = len(found) < len(model) and recorded is None
    return int(failed or not kernels or any("error" in cell for cell in cells))


def _measure(name: str) -> JSON | None:
    """In a process of its own: start-up counts, and memory comes back."""
    print(f"measuring {name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "trueline.bench.gpu.end_to_end"]
    done = subprocess.run([*command, name, repr(time.time())], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{name} failed; its words are above", file=sys.stderr, flush=True)
        return None
    result: JSON = json.loads(done.stdout.splitlines()[-1])
    return result


def _kernels(name: str) -> list[JSON]:
    """As the engine launches them; the modules have other ways too, and checks."""
    print(f"timing kernels: {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "cells.json"
        module = f"trueline.bench.gpu.kernels.{name}"
        command = [sys.executable, "-m", module, "--engine", "--out", str(out)]
        subprocess.run(command, stdout=sys.stderr, check=False)
        cells: list[JSON] = json.loads(out.read_text()) if out.exists() else []
    return cells


def _print(figures: JSON) -> None:
    from rich import box
    from rich.table import Table

    console = tables()
    columns = ("decode", "ms/step", "on device", "vLLM", "roofline", "target", "met", "to vLLM",
               "of roofline", "launches/layer")  # fmt: skip
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in figures["decode"]:
        name = f"{row['model']} B={row['B']} {row['inp'] // 1024}k"
        if "error" in row:
            table.add_row(name, row["error"][:60])
            continue
        table.add_row(
            name, f"{row['ms_step']:.2f}", _or_dash(row.get("step_us"), 1e-3),
            _or_dash(row["vllm_ms"]), f"{row['roofline_ms']:.2f}", f"{row['target_ms']:.1f}",
            "yes" if row["met"] else "no", _or_dash(row["to_vllm"]), f"{row['of_roofline']:.0%}",
            _or_dash(row.get("launches_per_layer")),
        )  # fmt: skip
    console.print(table)
    table = Table("prefill", "tokens/s", "vLLM", "to vLLM", "met", box=box.SIMPLE_HEAD)
    for row in figures["prefill"]:
        name = f"{row['model']} {row['B']} × {row['inp']}"
        if "error" in row:
            table.add_row(name, row["error"][:60])
            continue
        table.add_row(name, f"{row['tok_s']:,.0f}", _or_dash(row["vllm_tok_s"]),
                      _or_dash(row.get("to_vllm")), "yes" if row.get("met") else "no")  # fmt: skip
    console.print(table)
    table = Table("kernel", "µs", "vLLM's Triton", "best peer", "", "to best", box=box.SIMPLE_HEAD)
    for row in figures["kernel_cells"]:
        times = (f"{row[key]:.1f}" for key in ("us", "vllm_us", "best_us"))
        table.add_row(row["cell"], *times, row["best_peer"], f"{row['to_best']:.2f}")
    console.print(table)
    for row in figures["start"]:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases"].items())
        console.print(
            f"start to ready, {row['model']}: {row['s']:.1f} s (vLLM {_or_dash(row['vllm_s'])}): "
            f"{phases}"
        )


def _or_dash(value: float | None, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:,.2f}"
