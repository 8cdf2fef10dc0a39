"""One model's decode and prefill cells, in a process of its own: what start-up takes counts.

    python -m trueline.bench.gpu.end_to_end MODEL STARTED
    python -m trueline.bench.gpu.end_to_end MODEL FORMAT STARTED [REQUESTS,…]

STARTED: `date +%s`. REQUESTS: of the cells of short contexts these, in this order, and no others:
less is compiled for them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trueline.bench.footprint import tensor_bytes
from trueline.bench.formats import format_engine
from trueline.bench.gpu.roofline import checkpoint_bytes, decode_bytes
from trueline.bench.gpu.steps import decode_profile
from trueline.bench.workload import Workload, bench_engine, measure
from trueline.device import find_device, peak_resident_bytes, resident_bytes
from trueline.engine.executor import local_runner
from trueline.errors import UsageError
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

CELLS = Path(__file__).parent / "cells.json"
LONG = 4096
SPARE = 64
"""Positions beyond the longest cell's."""
FORMAT_DECODE: list[JSON] = [
    *({"B": batch, "inp": 1024, "out": 128} for batch in (1, 16, 64)),
    {"B": 256, "inp": 1024, "out": 128, "repeats": 1},
    {"B": 16, "inp": 32768},
]
FORMAT_PREFILL: list[JSON] = [{"B": 8, "inp": 4096}]


def run_cells(name: str, started: float) -> JSON:
    """Every cell of a model that peers were timed on."""
    cells = json.loads(CELLS.read_text())
    decode, prefill = (
        [cell for cell in cells[kind] if cell["model"] == name] for kind in ("decode", "prefill")
    )
    engine = bench_engine(name, max_model_len=_longest(decode + prefill))
    return {"model": name} | _measured(engine, decode, prefill, started)


def run_format(name: str, form: str, started: float, requests: Sequence[int] = ()) -> JSON:
    """The cells of a model whose weights are drawn in a format, and what it takes of memory."""
    find_device("auto")  # what a GPU's driver takes once is not the model's
    before = resident_bytes()
    cells, prompts, options = FORMAT_DECODE, FORMAT_PREFILL, {}
    if requests:
        short = {int(cell["B"]): cell for cell in FORMAT_DECODE if int(cell["inp"]) <= LONG}
        if unknown := set(requests) - set(short):
            accepted = ", ".join(map(str, short))
            raise UsageError(f"{min(unknown)} requests: there are cells of {accepted}")
        cells, prompts = [short[batch] for batch in requests], []
        options["max_num_seqs"] = max(requests)
    engine = format_engine(name, form, max_model_len=_longest(cells + prompts), **options)
    memory: JSON = {
        "loaded_bytes": tensor_bytes(local_runner(engine.core.executor).decoder),
        "checkpoint_bytes": checkpoint_bytes(engine.spec),
        "host_peak_bytes": None if before is None else (peak_resident_bytes() or 0) - before,
    }
    decode = [{"model": name} | cell | _roofline(engine, cell) for cell in cells]
    prefill = [{"model": name} | cell for cell in prompts]
    implementations = {
        label: {op: each.name for op, each in ops.items()}
        for label, ops in engine.plan.by_format.items()
    }
    about: JSON = {"model": name, "format": form, "implementations": implementations}
    return about | {"memory": memory} | _measured(engine, decode, prefill, started)


def _longest(cells: list[JSON]) -> int:
    return max(int(cell["inp"]) + int(cell.get("out", 1)) for cell in cells) + SPARE


def _roofline(engine: LLMEngine, cell: JSON) -> JSON:
    """In the middle of the cell's outputs."""
    context = cell["inp"] + cell.get("out", 0) // 2
    step = decode_bytes(engine.spec, engine.plan.kinds, cell["B"], context)
    return {
        "weight_bytes": step.weights,
        "cache_bytes": step.cache,
        "roofline_ms": 1e3 * step.seconds,
    }


def _measured(engine: LLMEngine, decode: list[JSON], prefill: list[JSON], started: float) -> JSON:
    """Each cell is reported on stderr as it is done. One without `out` is measured on the device
    alone."""
    measure(engine, Workload(1, 16, 2))
    found: JSON = {
        "start_s": time.time() - started,
        "start_phases": engine.startup_seconds,
        "plan": list(engine.plan.lines()),
        "decode": [],
        "prefill": [],
    }
    for cell in decode:
        served = "out" in cell
        found["decode"].append(_try(cell, lambda cell: _decode(engine, cell)) if served else cell)
    for cell in prefill:
        found["prefill"].append(_try(cell, lambda cell: _prefill(engine, cell)))
    # last: once a profiler has run, every launch takes longer
    found["decode"] = [
        _try(cell, lambda cell: decode_profile(engine, cell["B"], cell["inp"]))
        for cell in found["decode"]
    ]
    return found


def _try(cell: JSON, run: Callable[[JSON], JSON]) -> JSON:
    """The cell with its figures. One that fails is reported and does not stop the others."""
    try:
        figures = run(cell)
    except Exception as error:
        figures = {"error": repr(error)}
    print(json.dumps(cell | figures)[:400], file=sys.stderr, flush=True)
    return cell | figures


def _decode(engine: LLMEngine, cell: JSON) -> JSON:
    work = Workload(cell["B"], cell["inp"], cell["out"])
    long = cell["inp"] > LONG
    if long:  # what is compiled for such contexts
        measure(engine, Workload(1, cell["inp"], 2))
    figures = measure(engine, work, repeats=1 if long else cell.get("repeats", 2))
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


def main(model: str, *given: str) -> JSON:
    match given:
        case (started,):
            return run_cells(model, float(started))
        case (form, started):
            return run_format(model, form, float(started))
        case (form, started, requests):
            batches = [int(batch) for batch in requests.split(",")]
            return run_format(model, form, float(started), batches)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
