"""What kernels on weights in stored formats are timed on: an op of one size, in several ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from trueline.bench.formats import PUBLISHED, format_spec
from trueline.bench.gpu.kernels.timing import Calls, routes
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.ops.experts import hopper_w4a16
from trueline.ops.registry import implementation
from trueline.plan.plan import make_plan
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
FEW = {
    "v2lite": (1, 4, 16, 64),
    "v32s": (1, 4, 16, 64),
    "k25s": (1, 4, 8, 16, 32, 64),
    "v4s": (1, 4, 8, 16, 32, 64, 256),
}
"""Tokens whose experts are bound by reading weights."""
MANY = 8192
"""Tokens of the largest prefill step."""
GEMM_TARGET, GROUPED_TARGET = 1050, 900
"""TFLOP/s of fp8 at so many rows: dense GEMMs, and the two grouped ones of experts."""
INT4_TARGET, INT4_TOKENS = 0.75, range(16, 65)
"""Share of the roofline, by bytes."""
ALTERNATING = 4e8
"""Bytes of weights that calls alternate between: more than the L2 cache holds."""
CALLS = 20
CHECKED = 16
"""Rows of an output that are compared with the exact ones."""


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
    others: dict[str, Way] = field(default_factory=dict)
    """Launches that the stored way has, but does not choose at this size."""
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
        return found | ({"cublas": self.cublas} if self.cublas else {}) | self.others


@dataclass(frozen=True)
class Choice:
    """What the plan chooses for a model's stored weights, and for plain float: op -> name."""

    label: str
    """Of the format."""
    stored: dict[str, str]
    plain: dict[str, str]
    dtype: torch.dtype
    """Of activations."""


def chosen(spec: ModelSpec) -> Choice:
    config = EngineConfig(kv_cache_memory_bytes=1 << 30)
    plan = make_plan(spec, config, find_device(DEVICE.type))
    label = quantised_formats(spec)[0].label
    stored, plain = (
        {op: each.name for op, each in of.items()}
        for of in (plan.by_format[label], plan.selections)
    )
    return Choice(label, stored, plain, plan.compute_dtype)


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
    choice = chosen(spec)
    ours, plain = choice.stored["linear"], choice.plain["linear"]
    op, plain_op = implementation("linear", ours), implementation("linear", plain)
    cublas = implementation("linear", "cublas")
    weights = [_draw_stored(spec, shape, seed) for seed in range(_copies(math.prod(shape)))]
    packed = [op.pack(weight) for weight in weights]
    dense_weights = [_draw(*shape) for _ in range(_copies(2 * math.prod(shape)))]
    plain_packed = [plain_op.pack(weight) for weight in dense_weights]
    for rows in ROWS:
        x = torch.randn(rows, shape[1], dtype=choice.dtype, device=DEVICE)

        def exact(x: Tensor = x) -> tuple[Tensor, Tensor]:
            wanted = x[:CHECKED].float() @ weights[0].dequantise(torch.float32).T
            return op.run(x, packed[0])[:CHECKED], wanted

        yield FormatWork(
            cell={"op": "linear", "of": name, "shape": list(shape), "rows": rows},
            stored=Way(ours, [partial(op.run, x, w) for w in packed]),
            plain=Way(plain, [partial(plain_op.run, x, w) for w in plain_packed]),
            cublas=Way(
                "cublas", [partial(cublas.run, x.to(BF16), cublas.pack(w)) for w in dense_weights]
            ),
            label=choice.label,
            nbytes=weights[0].nbytes,
            flops=2 * rows * math.prod(shape),
            exact=exact,
            target={"tflops": GEMM_TARGET} if rows == MANY else {},
        )


def mlps() -> Iterator[FormatWork]:
    spec, (width, hidden) = format_spec("v32s", PUBLISHED["v32s"]), MLP
    choice = chosen(spec)
    ours, plain = choice.stored["mlp"], choice.plain["mlp"]
    op, linear = implementation("mlp", ours), implementation("linear", choice.stored["linear"])
    plain_op = implementation("mlp", plain)
    plain_linear = implementation("linear", choice.plain["linear"])
    first, second = (2 * width, hidden), (hidden, width)
    pairs = [
        (_draw_stored(spec, first, seed), _draw_stored(spec, second, seed)) for seed in range(2)
    ]
    packed = [op.pack(*pair, linear) for pair in pairs]
    plain_packed = [plain_op.pack(_draw(*first), _draw(*second), plain_linear) for _ in range(2)]
    for rows in ROWS:
        x = torch.randn(rows, hidden, dtype=choice.dtype, device=DEVICE)

        def exact(x: Tensor = x) -> tuple[Tensor, Tensor]:
            gate_up, down = (weight.dequantise(torch.float32) for weight in pairs[0])
            wanted = _gated(x[:CHECKED].float(), gate_up, down)
            return op.run(x, packed[0], linear)[:CHECKED], wanted

        yield FormatWork(
            cell={"op": "mlp", "of": "dense MLP", "shape": list(MLP), "rows": rows},
            stored=Way(ours, [partial(op.run, x, p, linear) for p in packed]),
            plain=Way(plain, [partial(plain_op.run, x, p, plain_linear) for p in plain_packed]),
            cublas=None,
            label=choice.label,
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

    def others(self, inputs: list[Inputs]) -> dict[str, Way]:
        """Streams and GEMMs of W4A16, whatever the number of pairs."""
        packed = self.packed
        if not isinstance(packed, hopper_w4a16.Packed):
            return {}
        runs = {
            "streams": partial(hopper_w4a16.run_with, hopper_w4a16.STREAMED),
            "short streams": partial(hopper_w4a16.run_with, hopper_w4a16.STREAMED, long=1),
            "GEMM": partial(hopper_w4a16.run_with, hopper_w4a16.MULTIPLIED[0]),
        }
        return {
            label: Way(self.name, [partial(run, *each, packed) for each in inputs])
            for label, run in runs.items()
        }


def experts(model: str, token_counts: tuple[int, ...]) -> Iterator[FormatWork]:
    spec = format_spec(model, PUBLISHED[model])
    moe = next(f for layer in spec.layers if isinstance(f := layer.feed_forward, MoESpec))
    count, top, hidden = moe.experts.total, moe.router.top_k, spec.hidden_size
    choice = chosen(spec)
    gate_up, down = _draw_experts(spec)
    plain_gate_up, plain_down = map(dense, _draw_experts(format_spec(model, "bfloat16")))
    stored = PackedExperts(choice.stored, gate_up, down)
    unquantised = PackedExperts(choice.plain, plain_gate_up, plain_down)
    for tokens in token_counts:
        many = tokens == MANY
        inputs = _inputs(count, top, tokens, hidden, choice.dtype)
        active = sum(len(set(ids.flatten().tolist())) for _, ids, _ in inputs) / len(inputs)

        def exact(inputs: Inputs = inputs[0]) -> tuple[Tensor, Tensor]:
            x, ids, shares = (each[:CHECKED] for each in inputs)
            return stored.run(*inputs)[:CHECKED], _exact_experts(x, ids, shares, gate_up, down)

        cublas = _equal_rows(plain_gate_up, plain_down, tokens * top // count) if many else None
        yield FormatWork(
            cell={
                "op": "experts",
                "of": model,
                "shape": [count, moe.expert_width.count, hidden],
                "rows": tokens,
                "rows_per_expert": tokens * top / active,
            },
            stored=stored.way(inputs),
            plain=unquantised.way(inputs),
            cublas=cublas,
            others={} if many else stored.others(inputs),
            label=choice.label,
            nbytes=(gate_up.nbytes + down.nbytes) * active / count,
            flops=6 * tokens * top * moe.expert_width.count * hidden,
            exact=exact,
            target=_experts_target(choice.label, tokens),
            profiled=many,
        )


def _inputs(count: int, top: int, tokens: int, hidden: int, dtype: torch.dtype) -> list[Inputs]:
    shares = torch.rand(tokens, top, device=DEVICE)
    return [
        (torch.randn(tokens, hidden, dtype=dtype, device=DEVICE), ids.to(DEVICE), shares)
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
    return {"gemm_tflops": GROUPED_TARGET} if tokens == MANY else {}


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
