"""Experts, router and the GEMMs around them on one GPU: times.

    python -m trueline.bench.gpu.kernels.experts [--quick] [--out FILE.json]

What is timed is compiled in several processes at once first. tests/gpu/test_gpu.py has the checks.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import (
    Cell,
    Ways,
    asked,
    graph_time,
    last_line,
    recorded,
    routes,
)
from trueline.bench.gpu.roofline import MULTIPLY, READ
from trueline.ops.batched_gemm import cublas as head_cublas
from trueline.ops.batched_gemm import triton as batched_gemm
from trueline.ops.experts import triton as experts
from trueline.ops.experts.triton import ExpertsLaunch, GemmTiles
from trueline.ops.linear import cublas
from trueline.ops.linear import triton as linear
from trueline.ops.mlp import triton as mlp
from trueline.ops.registry import implementation
from trueline.ops.route import triton as route
from trueline.spec.feedforward import RouterSpec

LINEAR = implementation("linear", "triton")
"""For ops that multiply by weights which they do not keep themselves."""
CALLS = 20
BF16 = torch.bfloat16
WORKERS = 12


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    width: int
    experts: int
    top: int
    shared: int
    router: RouterSpec


def _router(top: int, scoring: Literal["softmax", "sigmoid"], groups: int) -> RouterSpec:
    v3 = scoring == "sigmoid"
    return RouterSpec(
        scoring=scoring,
        correction_bias=v3,
        num_groups=groups,
        top_groups=max(groups // 2, 1),
        group_score="top2_sum" if groups > 1 else None,
        top_k=top,
        renormalise=v3,
        scaling_factor=2.5 if v3 else 1.0,
    )


MODELS = {
    "v2lite": Model(name="v2lite", hidden=2048, width=1408, experts=64, top=6, shared=2,
                    router=_router(6, "softmax", 1)),
    "ling25s": Model(name="ling25s", hidden=2048, width=512, experts=256, top=8, shared=1,
                     router=_router(8, "sigmoid", 8)),
    "v32s": Model(name="v32s", hidden=7168, width=2048, experts=64, top=8, shared=1,
                  router=_router(8, "sigmoid", 8)),
}  # fmt: skip
# out × in of the GEMMs that decode has.
SHAPES = (
    *((3648, 2048), (2048, 2048), (21888, 2048), (102400, 2048)),
    *((2112, 7168), (24576, 1536), (7168, 16384)),
)
HEADS = ((16, 512, 128), (16, 128, 512), (128, 512, 128), (128, 128, 512))


# -- data --------------------------------------------------------------------------------


class Data:
    """Made once per model or shape, and dropped before the next."""

    def __init__(self) -> None:
        self.held: tuple[int, ...] | tuple[str, bool] = ()
        self.packed: experts.Packed | None = None
        self.drawn: list[Tensor] = []

    def experts(self, model: Model, shared: bool) -> experts.Packed:
        if self._turns_to((model.name, shared)) or self.packed is None:
            e = model.experts + (model.shared if shared else 0)
            gate_up = _draw(e, 2 * model.width, model.hidden)
            down = _draw(e, model.hidden, model.width)
            self.packed = experts.Packed(gate_up, down, model.shared if shared else 0)
        return self.packed

    def weights(self, *shape: int) -> list[Tensor]:
        """Enough of them that no cache holds them all."""
        if self._turns_to(shape):
            copies = min(max(math.ceil(4e8 / (2 * math.prod(shape))), 2), CALLS)
            self.drawn = [_draw(*shape) for _ in range(copies)]
        return self.drawn

    def _turns_to(self, what: tuple[int, ...] | tuple[str, bool]) -> bool:
        """Whether it has to be made; what was held before is dropped."""
        if what == self.held:
            return False
        self.held, self.packed, self.drawn = what, None, []
        torch.cuda.empty_cache()
        return True


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda") / math.sqrt(shape[-1])


# -- configurations ------------------------------------------------------------------------


def expert_cuts(
    model: Model, tokens: int, shared: int, most: int
) -> list[tuple[str, ExpertsLaunch]]:
    """The one that the engine takes first, and the likeliest after it."""
    shape = model.experts, model.hidden, model.width
    usual = experts.launch(tokens, model.top, shared, *shape, BF16)
    found = [("usual", usual)]

    def both(name: str, way: Literal["few", "sorted"], cut: GemmTiles) -> None:
        found.append((name, ExpertsLaunch(way, cut, cut)))

    cut = usual.first
    if usual.way == "few":
        others = (GemmTiles(8, 512, stages=3), GemmTiles(2, 1024, stages=4), GemmTiles(1, 0))
        found += [(f"{cut.columns}x{cut.inner}", replace(usual, second=cut)) for cut in others]
    elif cut.rows < experts.MOST_ROWS:
        both("128x128x3", usual.way, replace(cut, columns=128, inner=128, stages=3))
        both("64x128x4", usual.way, replace(cut, columns=64, inner=128, stages=4))
        both("128x64x4", usual.way, replace(cut, columns=128, inner=64, stages=4))
        if cut.rows > 16:
            both("twice the rows", usual.way, replace(cut, rows=2 * cut.rows))
    else:
        both("256 group 1", "sorted", replace(cut, group=1))
        both("128x64 8w 3s", "sorted", replace(cut, columns=128, stages=3))
        both("128x64 4w 3s", "sorted", replace(cut, columns=128, warps=4, stages=3))
        both("256x64 4s", "sorted", replace(cut, stages=4))
    return found[:most]


def cells(quick: bool) -> Iterator[Cell]:
    for tokens in (1, 16, 64, 256, 4096):
        yield Cell("experts", ("v2lite", tokens, False))
    for name in MODELS:
        for tokens in (1, 16) if quick else (1, 16, 64, 256):
            yield Cell("experts", (name, tokens, True))
    for name in MODELS:
        for tokens in (1, 64) if quick else (1, 16, 64, 256, 8192):
            yield Cell("route", (name, tokens))
    for heads in HEADS:
        for rows in (1, 16, 64, 256):
            yield Cell("batched_gemm", (heads, rows))
    for shape in SHAPES[: 2 if quick else None]:
        for rows in (1, 16) if quick else (1, 16, 64, 256):
            yield Cell("linear", (shape, rows))
    yield Cell("mlp", ((18432, 7168), 1))
    yield Cell("mlp", ((10944, 2048), 1))


# -- what a cell runs ----------------------------------------------------------------------


@dataclass
class ExpertsWork:
    ways: Ways
    roofline: float
    """Seconds that the bytes, or the operations, take at least."""
    flops: float = 0.0
    exact: Callable[[], list[tuple[Tensor, Tensor]]] | None = None


def work(cell: Cell, data: Data) -> ExpertsWork:
    return MAKERS[cell.kind](data, *cell.key)


def _experts(data: Data, name: str, tokens: int, shared: bool) -> ExpertsWork:
    model = MODELS[name]
    packed = data.experts(model, shared)
    calls = 4 if tokens > 1000 else CALLS
    chosen = [ids.cuda() for ids in routes(model.experts, model.top, tokens, calls)]
    x = [torch.randn(tokens, model.hidden, device="cuda", dtype=BF16) for _ in chosen]
    weights = torch.rand(tokens, model.top, device="cuda")
    active = sum(len(set(ids.flatten().tolist())) + packed.shared for ids in chosen) / calls
    each = 3 * model.width * model.hidden
    flops = 2 * each * tokens * (model.top + packed.shared)

    inputs = list(zip(x, chosen, strict=True))

    def exact() -> list[tuple[Tensor, Tensor]]:
        ours = experts.run(x[0], chosen[0], weights, packed, LINEAR)
        return [(ours, _exact_experts(x[0], chosen[0], weights, packed))]

    cuts = expert_cuts(model, tokens, packed.shared, 3 if shared else 10)
    roofline = max(active * each * 2 / READ, flops / MULTIPLY)
    ways: Ways = [
        (label, [partial(experts.run_with, cut, a, ids, weights, packed) for a, ids in inputs])
        for label, cut in cuts
    ]
    return ExpertsWork(ways, roofline, flops, exact)


def _exact_experts(x: Tensor, ids: Tensor, weights: Tensor, packed: experts.Packed) -> Tensor:
    y = torch.zeros(x.shape, device=x.device)
    held = len(packed.down) - packed.shared
    for e in range(len(packed.down)):
        share = (weights * (ids == e)).sum(1) if e < held else torch.ones(len(x), device=x.device)
        rows = share.nonzero()[:, 0]
        if len(rows):
            gate, up = (x[rows].float() @ packed.gate_up[e].float().T).chunk(2, 1)
            part = (torch.nn.functional.silu(gate) * up) @ packed.down[e].float().T
            y[rows] += share[rows, None] * part
    return y


def _route(data: Data, name: str, tokens: int) -> ExpertsWork:
    model = MODELS[name]
    weight = _draw(model.experts, model.hidden).float()
    bias = torch.randn(model.experts, device="cuda") if model.router.correction_bias else None
    x = [torch.randn(tokens, model.hidden, device="cuda", dtype=BF16) for _ in range(CALLS)]
    packed = route.pack(weight, BF16, LINEAR)

    def apart(a: Tensor) -> tuple[Tensor, Tensor]:
        return route.run(linear.run(a.float(), weight), bias, model.router)

    usual = route.launch(tokens, model.experts, model.hidden, BF16, 132)
    cuts = [("usual", usual)]
    if tokens <= 64:
        cuts.append(("half the splits", replace(usual, depth=2 * usual.depth)))
    ways: Ways = [
        (label, [partial(route.choose_with, how, a, packed, bias, model.router) for a in x])
        for label, how in cuts
    ]
    ways.append(("separate GEMM", [partial(apart, a) for a in x]))

    def exact() -> list[tuple[Tensor, Tensor]]:
        ids, ours = route.choose(x[0], packed, LINEAR, bias, model.router)
        logits = (x[0].double() @ weight.double().T).float()
        _, theirs = route.run(logits, bias, model.router, ids)
        return [(ours, theirs)]

    return ExpertsWork(ways, weight.numel() * 2 / READ, 0, exact)


def _batched_gemm(data: Data, shape: tuple[int, int, int], rows: int) -> ExpertsWork:
    heads, columns, depth = shape
    weights = data.weights(heads, columns, depth)
    x = torch.randn(rows, heads, depth, device="cuda", dtype=BF16)
    to = torch.empty(rows, heads, columns + 64, device="cuda", dtype=BF16)[..., :columns]
    ways: Ways = [
        ("usual", [partial(batched_gemm.run, x, w, to) for w in weights]),
        ("cublas", [partial(head_cublas.run, x, w, to) for w in weights]),
    ]

    def exact() -> list[tuple[Tensor, Tensor]]:
        theirs = torch.einsum("nhi,hoi->nho", x.float(), weights[0].float())
        return [(batched_gemm.run(x, weights[0], to), theirs)]

    return ExpertsWork(ways, 2 * math.prod(shape) / READ, 0, exact)


def _linear(data: Data, shape: tuple[int, int], rows: int) -> ExpertsWork:
    weights = data.weights(*shape)
    x = torch.randn(rows, shape[1], device="cuda", dtype=BF16)
    ways: Ways = [
        ("usual", [partial(linear.run, x, w) for w in weights]),
        ("cublas", [partial(cublas.run, x, w) for w in weights]),
        ("to float32", [partial(linear.run_wide, x, w) for w in weights]),
    ]

    def exact() -> list[tuple[Tensor, Tensor]]:
        theirs = x.float() @ weights[0].float().T
        return [(linear.run(x, weights[0]), theirs), (linear.run_wide(x, weights[0]), theirs)]

    return ExpertsWork(ways, 2 * math.prod(shape) / READ, 2 * rows * math.prod(shape), exact)


def _mlp(data: Data, shape: tuple[int, int], rows: int) -> ExpertsWork:
    width, hidden = shape
    pairs = [(_draw(2 * width, hidden), _draw(hidden, width)) for _ in range(3)]
    x = torch.randn(rows, hidden, device="cuda", dtype=BF16)
    packed = [mlp.pack(*pair, LINEAR) for pair in pairs]
    plain = [replace(p, stream=None) for p in packed]
    ways: Ways = [
        ("stream", [partial(mlp.run, x, p, LINEAR) for p in packed]),
        ("cublas", [partial(mlp.run, x, p, LINEAR) for p in plain]),
    ]
    return ExpertsWork(ways, 6 * width * hidden / READ)


MAKERS: dict[str, Callable[..., ExpertsWork]] = {
    "experts": _experts,
    "route": _route,
    "batched_gemm": _batched_gemm,
    "linear": _linear,
    "mlp": _mlp,
}


# -- running -------------------------------------------------------------------------------


def compile_all(cells: list[Cell]) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    data, failed = Data(), []
    for cell in cells:
        try:
            for _, calls in asked(work(cell, data).ways):
                calls[0]()
        except Exception as error:
            failed.append(f"{cell}: {last_line(error)}")
    torch.cuda.synchronize()
    return failed


def measure(cell: Cell, data: Data) -> dict[str, object]:
    made = work(cell, data)
    times: dict[str, float] = {}
    for label, calls in asked(made.ways):
        try:
            times[label] = graph_time(calls)
        except Exception as error:
            print(f"FAIL {cell} {label}: {str(error).splitlines()[0]}")
    best = min(times, key=lambda label: times[label])
    roofline = made.roofline * 1e6
    line = f"{cell!s:<44} {best:<16} {times[best]:8.1f} µs"
    line += f"  roofline {roofline:7.1f} ({roofline / times[best]:4.0%})"
    if made.flops:
        line += f" {made.flops / times[best] / 1e6:5.0f} TFLOP/s"
    # peers were timed without the shared experts
    alike = cell.kind == "experts" and not cell.key[2]
    theirs = recorded("moe", M=cell.key[1]) if alike else {}
    if theirs:
        vllm = theirs["vLLM fused_experts"]
        line += f"  vLLM {vllm:.1f} ({times[best] / vllm:.2f}), best {min(theirs.values()):.1f}"
    print(line, " ".join(f"[{label} {us:.1f}]" for label, us in times.items()), flush=True)
    if made.exact is not None:
        for ours, exact in made.exact():
            off = (ours.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1)
            worst = float(off.max())
            if not worst <= 8e-3:
                print(f"FAIL {cell}: off by {worst:.2g}")
    return {"cell": str(cell), "roofline_us": roofline, "us": times, "peers": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--engine", action="store_true", help="only what the engine takes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    todo = list(cells(options.quick))
    torch.backends.cuda.matmul.allow_tf32 = False
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        # Neighbours share data: a worker takes a run of cells.
        size = math.ceil(len(todo) / WORKERS)
        compiled = [pool.submit(compile_all, todo[i : i + size]) for i in range(0, len(todo), size)]
        for future in compiled:
            for failure in future.result():
                print(failure, flush=True)
    data, rows = Data(), []
    for cell in todo:
        try:
            rows.append(measure(cell, data))
        except Exception:
            print(f"FAIL {cell}", *traceback.format_exc().splitlines()[-5:], sep="\n     ")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
