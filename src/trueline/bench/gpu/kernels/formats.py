"""Weights in stored formats on one GPU: GEMMs, MLPs and routed experts as the plan chooses them,
beside bfloat16 and cuBLAS.

    python -m trueline.bench.gpu.kernels.formats [--out FILE.json]

A time is that of a whole op, with whatever it does to activations. What is timed is compiled in
several processes at once first.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from trueline.bench.formats import PUBLISHED, format_spec
from trueline.bench.gpu.kernels.timing import Calls, graph_time, last_line, routes
from trueline.bench.gpu.roofline import READ
from trueline.bench.gpu.steps import kernel_times
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.ops.capabilities import Context
from trueline.ops.registry import implementation
from trueline.plan.numerics import WEIGHTS, choose_numerics
from trueline.plan.select import PACKING, choose_ops
from trueline.spec.feedforward import MoESpec
from trueline.spec.model import ModelSpec
from trueline.utils.json_types import JSON
from trueline.weights.dummy import DummyWeights, draw_stored
from trueline.weights.formats import quantised_formats
from trueline.weights.value import StoredPart, Weight, dense

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
# out × in of v32s's GEMMs; width and hidden size of its dense MLP.
GEMMS = {
    "q_a + kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "o": (7168, 16384),
    "gate_up": (36864, 7168),
    "down": (7168, 18432),
}
MLP = (18432, 7168)
ROWS = (1, 16, 64, 256, 1024, 8192)
FEW = {"v2lite": (1, 4, 16, 64), "v32s": (1, 4, 16, 64), "k25s": (1, 4, 8, 16, 32, 64)}
"""Tokens whose experts are bound by reading weights."""
MANY = 8192
"""Tokens of the largest prefill step."""
GEMM_TARGET, GROUPED_TARGET = 1050, 900
"""TFLOP/s of fp8: GEMMs of so many rows, and experts of as many tokens."""
INT4_TARGET, INT4_TOKENS = 0.75, range(16, 65)
"""Share of the roofline, by bytes."""
ALTERNATING = 4e8
"""Bytes of weights that calls alternate between: more than the L2 cache holds."""
CALLS = 20
CHECKED = 16
"""Rows of an output that are compared with the exact ones."""
ACCEPTED = {"block fp8": 2.0**-4, "int4": 8e-3}
"""Relative error of such a row: activations in e4m3 keep three bits; else, sums in bfloat16."""
WORKERS = 12


@dataclass
class Way:
    name: str
    """Of the implementation."""
    calls: Calls
    """Alike, on different inputs."""


@dataclass(kw_only=True)
class FormatWork:
    """An op of one size, in several ways."""

    cell: JSON
    stored: Way
    plain: Way
    cublas: Way | None
    label: str
    """Of the format."""
    nbytes: float
    """Of the weights that a call must read, as stored."""
    flops: float
    exact: Callable[[], tuple[Tensor, Tensor]]
    """Some rows of what the stored way gives, and the exact ones."""
    target: JSON = field(default_factory=dict)
    profiled: bool = False

    @property
    def ways(self) -> dict[str, Way]:
        found = {"stored": self.stored, "bfloat16": self.plain}
        return found | ({"cublas": self.cublas} if self.cublas else {})


def chosen(spec: ModelSpec) -> tuple[str, dict[str, str], dict[str, str]]:
    """The label of a model's format, and the plan's implementations for it and for plain float."""
    label = quantised_formats(spec)[0].label
    device = find_device(DEVICE.type)
    context = Context(dtype=BF16, device=device.kind, compute_capability=device.compute_capability)
    config = EngineConfig()
    numerics = choose_numerics(spec, config, context)
    of_format = numerics.name if label in numerics.formats else WEIGHTS
    plain, by_format = choose_ops(PACKING, config, context, {label: of_format})
    ours, plain_names = (
        {op: each.name for op, each in of.items()} for of in (by_format[label], plain)
    )
    return label, ours, plain_names


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device=DEVICE) / math.sqrt(shape[-1])


def _draw_stored(spec: ModelSpec, shape: tuple[int, int], seed: int) -> Weight:
    fmt = quantised_formats(spec)[0]
    stored = draw_stored(fmt, shape, BF16, torch.Generator(DEVICE).manual_seed(seed))
    return Weight(shape, BF16, (StoredPart(stored, fmt.label, (0, 0)),), DEVICE, DEVICE)


def _copies(nbytes: int) -> int:
    return min(max(math.ceil(ALTERNATING / nbytes), 2), CALLS)


# -- GEMMs and MLPs ------------------------------------------------------------------------


def gemms(name: str) -> Iterator[FormatWork]:
    spec, shape = format_spec("v32s", PUBLISHED["v32s"]), GEMMS[name]
    label, ours, plain = chosen(spec)
    op, plain_op = (implementation("linear", names["linear"]) for names in (ours, plain))
    cublas = implementation("linear", "cublas")
    weights = [_draw_stored(spec, shape, seed) for seed in range(_copies(math.prod(shape)))]
    packed = [op.pack(weight) for weight in weights]
    dense_weights = [_draw(*shape) for _ in range(_copies(2 * math.prod(shape)))]
    plain_packed = [plain_op.pack(weight) for weight in dense_weights]
    for rows in ROWS:
        x = torch.randn(rows, shape[1], dtype=BF16, device=DEVICE)

        def exact(x: Tensor = x) -> tuple[Tensor, Tensor]:
            wanted = x[:CHECKED].float() @ weights[0].dequantise(torch.float32).T
            return op.run(x, packed[0])[:CHECKED], wanted

        yield FormatWork(
            cell={"op": "linear", "of": name, "shape": list(shape), "rows": rows},
            stored=Way(ours["linear"], [partial(op.run, x, w) for w in packed]),
            plain=Way(plain["linear"], [partial(plain_op.run, x, w) for w in plain_packed]),
            cublas=Way("cublas", [partial(cublas.run, x, cublas.pack(w)) for w in dense_weights]),
            label=label,
            nbytes=weights[0].nbytes,
            flops=2 * rows * math.prod(shape),
            exact=exact,
            target={"tflops": GEMM_TARGET} if rows == MANY else {},
        )


def mlps() -> Iterator[FormatWork]:
    spec, (width, hidden) = format_spec("v32s", PUBLISHED["v32s"]), MLP
    label, ours, plain = chosen(spec)
    op, linear = implementation("mlp", ours["mlp"]), implementation("linear", ours["linear"])
    plain_op = implementation("mlp", plain["mlp"])
    plain_linear = implementation("linear", plain["linear"])
    first, second = (2 * width, hidden), (hidden, width)
    pairs = [
        (_draw_stored(spec, first, seed), _draw_stored(spec, second, seed)) for seed in range(2)
    ]
    packed = [op.pack(*pair, linear) for pair in pairs]
    plain_packed = [plain_op.pack(_draw(*first), _draw(*second), plain_linear) for _ in range(2)]
    for rows in ROWS:
        x = torch.randn(rows, hidden, dtype=BF16, device=DEVICE)

        def exact(x: Tensor = x) -> tuple[Tensor, Tensor]:
            gate_up, down = (weight.dequantise(torch.float32) for weight in pairs[0])
            wanted = _gated(x[:CHECKED].float(), gate_up, down)
            return op.run(x, packed[0], linear)[:CHECKED], wanted

        yield FormatWork(
            cell={"op": "mlp", "of": "dense MLP", "shape": list(MLP), "rows": rows},
            stored=Way(ours["mlp"], [partial(op.run, x, p, linear) for p in packed]),
            plain=Way(
                plain["mlp"], [partial(plain_op.run, x, p, plain_linear) for p in plain_packed]
            ),
            cublas=None,
            label=label,
            nbytes=sum(weight.nbytes for weight in pairs[0]),
            flops=6 * rows * width * hidden,
            exact=exact,
        )


def _gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, 1)
    return (silu(gate) * up) @ down.T


# -- routed experts ------------------------------------------------------------------------


Inputs = tuple[Tensor, Tensor, Tensor]
"""x, ids and weights of some tokens."""


class PackedExperts:
    """As an implementation keeps them."""

    def __init__(
        self, names: dict[str, str], gate_up: Weight | Tensor, down: Weight | Tensor
    ) -> None:
        self.name = names["experts"]
        self.op = implementation("experts", self.name)
        self.linear = implementation("linear", names["linear"])
        self.packed = self.op.pack(gate_up, down, self.linear)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.op.run(x, ids, weights, self.packed, self.linear)

    def way(self, inputs: list[Inputs]) -> Way:
        return Way(self.name, [partial(self.run, *each) for each in inputs])


def experts(model: str, token_counts: tuple[int, ...]) -> Iterator[FormatWork]:
    spec = format_spec(model, PUBLISHED[model])
    moe = next(f for layer in spec.layers if isinstance(f := layer.feed_forward, MoESpec))
    count, top, hidden = moe.experts.total, moe.router.top_k, spec.hidden_size
    label, ours, plain = chosen(spec)
    gate_up, down = _draw_experts(spec)
    plain_gate_up, plain_down = map(dense, _draw_experts(format_spec(model, "bfloat16")))
    stored = PackedExperts(ours, gate_up, down)
    unquantised = PackedExperts(plain, plain_gate_up, plain_down)
    for tokens in token_counts:
        many = tokens == MANY
        inputs = _inputs(count, top, tokens, hidden)
        active = sum(len(set(ids.flatten().tolist())) for _, ids, _ in inputs) / len(inputs)

        def exact(inputs: Inputs = inputs[0]) -> tuple[Tensor, Tensor]:
            x, ids, shares = (each[:CHECKED] for each in inputs)
            return stored.run(*inputs)[:CHECKED], _exact_experts(x, ids, shares, gate_up, down)

        cublas = _equal_rows(plain_gate_up, plain_down, tokens * top // count) if many else None
        yield FormatWork(
            cell={
                "op": "experts",
                "of": model,
                "shape": [count, moe.expert_width, hidden],
                "rows": tokens,
                "rows_per_expert": tokens * top / active,
            },
            stored=stored.way(inputs),
            plain=unquantised.way(inputs),
            cublas=cublas,
            label=label,
            nbytes=(gate_up.nbytes + down.nbytes) * active / count,
            flops=6 * tokens * top * moe.expert_width * hidden,
            exact=exact,
            target=_experts_target(label, tokens),
            profiled=many,
        )


def _inputs(count: int, top: int, tokens: int, hidden: int) -> list[Inputs]:
    shares = torch.rand(tokens, top, device=DEVICE)
    return [
        (torch.randn(tokens, hidden, dtype=BF16, device=DEVICE), ids.to(DEVICE), shares)
        for ids in routes(count, top, tokens, 4 if tokens == MANY else CALLS)
    ]


def _equal_rows(gate_up: Tensor, down: Tensor, rows: int) -> Way:
    """The two products alone, of equally many rows for each expert: batched GEMMs."""
    count, hidden, width = down.shape
    x = torch.randn(count, rows, hidden, dtype=BF16, device=DEVICE)
    middle = torch.randn(count, rows, width, dtype=BF16, device=DEVICE)
    return Way("cublas", [lambda: (x @ gate_up.mT, middle @ down.mT)] * 2)


def _experts_target(label: str, tokens: int) -> JSON:
    if label == "int4":
        return {"of_roofline": INT4_TARGET} if tokens in INT4_TOKENS else {}
    return {"tflops": GROUPED_TARGET} if tokens == MANY else {}


def _draw_experts(spec: ModelSpec) -> tuple[Weight, Weight]:
    """Of the last layer."""
    drawn = DummyWeights(spec, dtype=BF16, device=DEVICE, seed=0)
    name = f"model.layers.{spec.layers[-1].index}.mlp.experts"
    return drawn.pop(f"{name}.gate_up_proj"), drawn.pop(f"{name}.down_proj")


def _exact_experts(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    x, wanted = x.float(), set(ids.flatten().tolist())
    y = torch.zeros_like(x)
    for e, (first, second) in enumerate(zip(gate_up.unstack(), down.unstack(), strict=True)):
        if e in wanted:
            weights = (each.dequantise(torch.float32) for each in (first, second))
            share = (shares * (ids == e)).sum(1)
            y += share[:, None] * _gated(x, *weights)
    return y


# -- running -------------------------------------------------------------------------------


Group = Callable[[], Iterator[FormatWork]]
"""Draws its weights once."""


def dense_groups() -> list[Group]:
    return [*(partial(gemms, name) for name in GEMMS), mlps]


def compiled_groups() -> list[Group]:
    return dense_groups() + [partial(experts, model, (*FEW[model], MANY)) for model in FEW]


def timed_groups() -> list[Group]:
    """What is profiled comes last: launches take longer after it."""
    few = [partial(experts, model, tokens) for model, tokens in FEW.items()]
    return [*dense_groups(), *few, *(partial(experts, model, (MANY,)) for model in FEW)]


def compile_all(group: Group) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    failed = []
    try:
        for work in group():
            for way in (work.stored, work.plain):
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
    if work.target:
        row["met"] = all(row[key] >= least for key, least in work.target.items())
    ours, exact = work.exact()
    row["off"] = float(((ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    if not row["off"] <= ACCEPTED[work.label]:
        row["error"] = f"off by {row['off']:.2g}, accepted: {ACCEPTED[work.label]:.2g}"
    if work.profiled:
        row["kernels"] = [each.as_json() for each in kernel_times(work.stored.calls[0])]
    return row


def measure_all() -> Iterator[JSON]:
    for group in timed_groups():
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for failed in pool.map(compile_all, compiled_groups()):
            for failure in failed:
                print(failure, flush=True)
    rows = list(measure_all())
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
