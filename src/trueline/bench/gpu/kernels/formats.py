"""Weights in stored formats on one GPU: GEMMs, MLPs and routed experts as the plan chooses them,
beside bfloat16 and cuBLAS.

    python -m trueline.bench.gpu.kernels.formats [--experts MODEL] [--out FILE.json]

A time is that of a whole op, with whatever it does to activations. What is timed is compiled in
several processes at once first. --experts: those of one model for few tokens alone.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from trueline.bench.gpu.kernels.format_work import (
    FEW,
    GEMMS,
    MANY,
    FormatWork,
    experts,
    gemms,
    mlps,
)
from trueline.bench.gpu.kernels.timing import graph_time, last_line
from trueline.bench.gpu.roofline import READ
from trueline.bench.gpu.steps import KernelTime, kernel_times
from trueline.utils.json_types import JSON

ACCEPTED = {"block fp8": 2.0**-4, "int4": 8e-3, "fp4": 8e-3}
"""Relative error of a row: activations in e4m3 keep three bits; else, sums are in bfloat16."""
WORKERS = 12
Group = Callable[[], Iterator[FormatWork]]
"""Draws its weights once."""


def dense_groups() -> list[Group]:
    return [*(partial(gemms, name) for name in GEMMS), mlps]


def compiled_groups(model: str | None) -> list[Group]:
    if model is not None:
        return timed_groups(model)
    return dense_groups() + [partial(experts, model, (*FEW[model], MANY)) for model in FEW]


def timed_groups(model: str | None) -> list[Group]:
    """What is profiled comes last: launches take longer after it."""
    if model is not None:
        return [partial(experts, model, FEW[model])]
    few = [partial(experts, model, tokens) for model, tokens in FEW.items()]
    return [*dense_groups(), *few, *(partial(experts, model, (MANY,)) for model in FEW)]


def compile_all(group: Group) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    failed = []
    try:
        for work in group():
            for way in (work.stored, work.plain, *work.others.values()):
                way.calls[0]()
    except Exception as error:
        failed.append(f"FAIL compiling: {last_line(error)}")
    torch.cuda.synchronize()
    return failed


def measure(work: FormatWork) -> JSON:
    us = {label: graph_time(way.calls) for label, way in work.ways.items()}
    row: JSON = work.cell | {
        "format": work.label,
        "implementations": {label: way.name for label, way in work.ways.items()},
        "us": us,
        "bytes": work.nbytes,
        "flops": work.flops,
        "of_roofline": work.nbytes / READ / us["stored"] * 1e6,
        "tflops": work.flops / us["stored"] / 1e6,
        "target": work.target,
    }
    if work.profiled:
        kernels = kernel_times(work.stored.calls[0])
        row["gemm_tflops"] = work.flops / gemm_us(kernels) / 1e6
        row["kernels"] = [each.as_json() for each in kernels]
    if work.target:
        row["met"] = all(row[key] >= least for key, least in work.target.items())
    ours, exact = work.exact()
    row["off"] = float(((ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    if not row["off"] <= ACCEPTED[work.label]:
        row["error"] = f"off by {row['off']:.2g}, accepted: {ACCEPTED[work.label]:.2g}"
    return row


def gemm_us(kernels: Sequence[KernelTime]) -> float:
    """Of the two GEMMs of experts, without what is around them: the two longest launches."""
    launches = [us for each in kernels for us in [each.us / each.calls] * round(each.calls)]
    return sum(sorted(launches)[-2:])


def measure_all(model: str | None) -> Iterator[JSON]:
    for group in timed_groups(model):
        try:
            for work in group():
                row = measure(work)
                print(json.dumps({key: row[key] for key in row if key != "kernels"}), flush=True)
                yield row
        except Exception as error:
            print("FAIL", *traceback.format_exc().splitlines()[-5:], sep="\n     ", flush=True)
            yield {"op": repr(group), "error": last_line(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", choices=FEW)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for failed in pool.map(compile_all, compiled_groups(options.experts)):
            for failure in failed:
                print(failure, flush=True)
    rows = list(measure_all(options.experts))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
