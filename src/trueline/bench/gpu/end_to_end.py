"""One model's decode and prefill cells, in a process of its own: what start-up takes counts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trueline.bench.gpu.steps import decode_profile
from trueline.bench.workload import Workload, bench_engine, measure
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

CELLS = Path(__file__).parent / "cells.json"
LONG = 4096
SPARE = 64
"""Positions beyond the longest cell's."""


def run_cells(name: str, started: float) -> JSON:
    """Every cell of the model, reported on stderr as it is done."""
    cells = json.loads(CELLS.read_text())
    decode, prefill = (
        [cell for cell in cells[kind] if cell["model"] == name] for kind in ("decode", "prefill")
    )
    longest = max(cell["inp"] + cell.get("out", 1) for cell in decode + prefill) + SPARE
    engine = bench_engine(name, max_model_len=longest)
    measure(engine, Workload(1, 16, 2))
    found: JSON = {
        "model": name,
        "start_s": time.time() - started,
        "start_phases": engine.startup_seconds,
        "plan": list(engine.plan.lines()),
        "decode": [],
        "prefill": [],
    }
    for cell in decode:
        _try(found["decode"], cell, lambda cell: _decode(engine, cell))
    for cell in prefill:
        _try(found["prefill"], cell, lambda cell: _prefill(engine, cell))
    # last: once a profiler has run, every launch takes longer
    for cell in found["decode"]:
        cell |= decode_profile(engine, cell["B"], cell["inp"])
    return found


def _try(into: list[JSON], cell: JSON, run: Callable[[JSON], JSON]) -> None:
    """A cell that fails is reported and does not stop the others."""
    try:
        into.append(cell | run(cell))
    except Exception as error:
        into.append(cell | {"error": repr(error)})
    print(json.dumps(into[-1])[:400], file=sys.stderr, flush=True)


def _decode(engine: LLMEngine, cell: JSON) -> JSON:
    work = Workload(cell["B"], cell["inp"], cell["out"])
    long = cell["inp"] > LONG
    if long:  # what is compiled for such contexts
        measure(engine, Workload(1, cell["inp"], 2))
    figures = measure(engine, work, repeats=1 if long else 2)
    rate = figures.decode_tokens_per_s
    return {
        "tok_s": rate,
        "ms_step": 1000 * cell["B"] / rate,
        "first_s": figures.first_token_s,
        "prefill_tok_s": figures.prefill_tokens_per_s,
    }


def _prefill(engine: LLMEngine, cell: JSON) -> JSON:
    figures = measure(engine, Workload(cell["B"], cell["inp"], 1), repeats=2)
    return {"tok_s": figures.prefill_tokens_per_s, "s": figures.first_token_s}


if __name__ == "__main__":
    print(json.dumps(run_cells(sys.argv[1], float(sys.argv[2]))))
