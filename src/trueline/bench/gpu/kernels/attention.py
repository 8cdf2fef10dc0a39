"""Latent attention on one GPU: numbers at real shapes, and times of every way to cut it.

    python -m trueline.bench.gpu.kernels.attention [--quick] [--engine] [--out FILE.json]

What is timed is compiled in several processes at once first. tests/gpu/test_gpu.py has the checks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.attention_work import (
    CHOOSING,
    AttentionWork,
    LatentPool,
    Pairs,
    bits_work,
    chosen_work,
    decode_work,
    prefill_work,
    sparse_work,
)
from trueline.bench.gpu.kernels.timing import asked, graph_time, last_line
from trueline.bench.gpu.roofline import READ
from trueline.utils.json_types import JSON

GATE = 8e-3
"""Relative error of a row in bfloat16."""
DECODE = (
    *((16, 1, n) for n in (1024, 8192, 32768)),
    *((16, rows, n) for rows in (16, 64, 256) for n in (1024, 8192)),
    *((128, rows, 8192) for rows in (1, 16, 64, 256)),
)
"""Heads, rows and context, as the peers were measured."""
SPARSE = ((128, 1), (128, 16), (128, 64), (16, 16))
PREFILL = (
    *((16, 1, 0, 4096), (16, 8, 0, 4096), (128, 1, 0, 4096)),
    *((16, 1, 31744, 1024), (128, 1, 31744, 1024)),
)
"""Heads, rows, positions before and new ones."""
CHOSEN = ((8, 2048), (1, 6144), (1, 10240), (1, 14336))
"""Runs of 2048 tokens, and positions before them, of which TOPK are chosen."""
FORMS = tuple((heads, 1, 16384, count) for heads in (16, 128) for count in (4, 16, 64))


Cell = tuple[str, Callable[[LatentPool], AttentionWork]]


def cells(quick: bool) -> Iterator[Cell]:
    for key in DECODE[::4] if quick else DECODE:
        yield "decode  {:>3} heads, {:>3} x {:>5}".format(*key), partial(decode_work, *key)
    for pair in SPARSE[:2] if quick else SPARSE:
        yield "sparse  {:>3} heads, {:>3} rows  ".format(*pair), partial(sparse_work, *pair)
    for four in PREFILL[:2] if quick else PREFILL:
        name = "prefill {:>3} heads, {} x {:>5} + {}".format(*four)
        yield name, partial(prefill_work, *four, forms=False)
    for runs, start in CHOSEN[:1] if quick else CHOSEN:
        name = f"chosen  128 heads, {runs} x {start:>5} + {CHOOSING}"
        yield name, partial(chosen_work, 128, runs, start)
    yield f"bits of choices, {CHOSEN[0][0]} x {CHOSEN[0][1]}", partial(bits_work, *CHOSEN[0])
    for four in () if quick else FORMS:
        name = "forms   {:>3} heads, {} x {:>5} + {}".format(*four)
        yield name, partial(prefill_work, *four, forms=True)


# -- running -------------------------------------------------------------------------------


def compile_cell(index: int, quick: bool) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    name, make = list(cells(quick))[index]
    failed = []
    try:
        for label, calls in asked(make(LatentPool()).ways.items()):
            try:
                calls[0]()
            except Exception as error:
                failed.append(f"FAIL {name} {label}: {last_line(error)}")
        torch.cuda.synchronize()
    except Exception as error:
        failed.append(f"FAIL {name}: {last_line(error)}")
    return failed


def measure(name: str, made: AttentionWork) -> JSON:
    times: dict[str, float] = {}
    for label, calls in asked(made.ways.items()):
        try:
            if made.exact is not None:
                first = calls[0]()
                out = first if isinstance(first, Tensor) else first[0]
                verify(f"{name} {label}", made.exact(out))
            times[label] = graph_time(calls)
        except Exception as error:
            print(f"FAIL {name} {label}: {last_line(error)}", flush=True)
            torch.cuda.synchronize()
    if not times:
        return {"cell": name, "us": times}
    best = min(times, key=lambda label: times[label])
    us = times[best]
    line = f"{name:<34} {best:<16} {us:8.1f} µs"
    if made.bytes:
        line += f" {made.bytes / us / 1e3:5.0f} GB/s ({made.bytes / READ * 1e6 / us:4.0%})"
    line += f" {made.flops / us / 1e6:4.0f} TFLOP/s"
    if made.peers:
        peer, theirs = min(made.peers.items(), key=lambda each: each[1])
        vllm = made.peers["vLLM triton"]
        line += f"  {us / theirs:.2f} of {peer} {theirs:.1f}, {us / vllm:.2f} of vLLM {vllm:.1f}"
    print(line, " ".join(f"[{label} {t:.1f}]" for label, t in times.items()), flush=True)
    return {"cell": name, "best": best, "us": times, "peers": made.peers}


def verify(what: str, pairs: Pairs) -> None:
    for ours, exact in pairs:
        error = (ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
        worst = float(error.max())
        if not worst <= GATE:
            print(f"FAIL {what}: off by {worst:.2g}, accepted {GATE}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--engine", action="store_true", help="only what the engine takes")
    parser.add_argument("--only", default="", help="cells whose name begins so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    todo = [(i, *cell) for i, cell in enumerate(cells(options.quick))]
    todo = [each for each in todo if each[1].startswith(options.only)]
    # Cells of one kind and as many heads compile the same kernels, but for the first and the last.
    first = {name.split(",")[0]: i for i, name, _ in reversed(todo)}
    last = {name.split(",")[0]: i for i, name, _ in todo}
    kinds = {*first.values(), *last.values()}
    with ProcessPoolExecutor(len(kinds), get_context("spawn")) as pool:
        futures = [pool.submit(compile_cell, i, options.quick) for i in kinds]
        for future in futures:
            for failure in future.result():
                print(failure, flush=True)
    rows, results = LatentPool(), []
    for _, name, make in todo:
        try:
            results.append(measure(name, make(rows)))
        except Exception as error:
            print(f"FAIL {name}: {last_line(error)}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
