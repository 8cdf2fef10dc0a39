"""GEMMs, norms, rotation, experts: against their float64 references."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from trueline.ops.batched_gemm import BatchedGemm
from trueline.ops.batched_gemm import reference as batched_gemm_reference
from trueline.ops.capabilities import Opaque
from trueline.ops.experts import AddingExperts, Experts, SharedExperts
from trueline.ops.experts import reference as experts_reference
from trueline.ops.linear import LinearOp
from trueline.ops.linear import reference as linear_reference
from trueline.ops.mlp import MLP
from trueline.ops.mlp import reference as mlp_reference
from trueline.ops.registry import implementation
from trueline.ops.rms_norm import RMSNorm
from trueline.ops.rms_norm import reference as rms_norm_reference
from trueline.ops.rope import Rope
from trueline.ops.rope import reference as rope_reference
from trueline.ops.route import Route
from trueline.ops.route import reference as route_reference
from trueline.plan.select import is_batch_invariant
from trueline.spec.feedforward import RouterSpec
from trueline.spec.rope import Pairing
from trueline.verify import bounds
from trueline.verify.ops.data import (
    close,
    randn,
    require,
    rounded_alike,
    torch_linear,
    within,
)

Shapes = Sequence[tuple[int, ...]]
LINEAR = ("torch_mm", "cublas")
"""Of the implementations that an mlp is given, one packs weights in its own way, one keeps them."""
ROTATION = 4
"""Roundings of a rotated row: two products and their sum, in either number of a pair."""


def linear(
    op: LinearOp,
    dtype: torch.dtype = torch.float32,
    shapes: Shapes = ((17, 13), (101, 67), (256, 384)),
    tokens: Sequence[int] = (1, 2, 3, 4, 5, 17, 130),
) -> None:
    """`shapes`: of weights, [out, in]."""
    for shape in shapes:
        weight = randn(*shape).to(dtype)
        packed, exact_packed = op.pack(weight), linear_reference.pack(weight)
        for rows in tokens:
            x = randn(rows, shape[1] + 3, seed=1).to(dtype)[:, 1:-2]
            before = x.clone()
            exact = linear_reference.run(x.double(), exact_packed)
            sums = bounds.gemm(x, weight, dtype)
            for strided in (x, x.T.contiguous().T):
                what = f"linear, {shape}, {rows} rows"
                within(what, op.run(strided, packed), exact, sums + bounds.stored(exact, dtype))
                wide = op.run_wide(strided, packed)
                require(wide.dtype == torch.float32, f"{what}: {wide.dtype}")
                within(f"{what}, float32", wide, exact, sums)
            require(torch.equal(x, before), "linear writes its input")


def linear_bits(op: LinearOp) -> None:
    require(is_batch_invariant(op, torch.float32), "linear: a row's bits depend on other rows")


def batched_gemm(
    op: BatchedGemm[Opaque],
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (5, 37, 19),
    tokens: Sequence[int] = (1, 4, 9, 40, 70),
) -> None:
    count, out, inner = shape
    weight = randn(*shape).to(dtype)
    linear = torch_linear()
    exact_packed = batched_gemm_reference.pack(weight, linear, True)
    for invariant in (True, False):
        packed = op.pack(weight, linear, invariant)
        for rows in tokens:
            x = randn(rows, count, inner + 4, seed=1).to(dtype)[..., 2:-2]
            exact = batched_gemm_reference.run(x.double(), exact_packed)
            off = bounds.gemm(x.transpose(0, 1), weight, dtype).transpose(0, 1)
            off = off + bounds.stored(exact, dtype)
            for strided in (x, x.permute(2, 1, 0).contiguous().permute(2, 1, 0)):
                within(f"batched_gemm, {rows} rows", op.run(strided, packed), exact, off)
            wide = torch.full((rows, count, out + 3), torch.nan, dtype=dtype)
            op.run(x, packed, wide[..., 1:-2])
            within(f"batched_gemm, a wider tensor, {rows} rows", wide[..., 1:-2], exact, off)
            require(bool(wide[..., [0, -2, -1]].isnan().all()), "batched_gemm writes beside")


def batched_gemm_bits(op: BatchedGemm[Opaque]) -> None:
    packed, x = op.pack(randn(5, 37, 19), torch_linear(), True), randn(9, 5, 19, seed=1)
    whole = op.run(x, packed)
    for part in (slice(0, 1), slice(2, 6), slice(8, 9)):
        require(torch.equal(op.run(x[part], packed), whole[part]), "batched_gemm: a row's bits")


def mlp(
    op: MLP[Opaque],
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (29, 43),
    tokens: Sequence[int] = (1, 3, 8, 21),
    limit: float | None = None,
) -> None:
    """`dims`: hidden size and width; numbers are as large in all."""
    D, W = dims
    size = 1 if dtype == torch.float32 else 8  # so that float16 holds what is between the GEMMs
    gate_up = randn(2 * W, D) * (math.sqrt(29 / D) / size)
    gate_up, down = gate_up.to(dtype), (randn(D, W, seed=1) * math.sqrt(43 / W)).to(dtype)
    exact_packed = mlp_reference.pack(gate_up, down, None, limit)
    for name in LINEAR:
        linear = implementation("linear", name)
        packed = op.pack(gate_up, down, linear, limit)
        for rows in tokens:
            x = _far_into_silu(rows, D).to(dtype)
            exact = mlp_reference.run(x.double(), exact_packed, None)
            off = bounds.mlp(x, gate_up, down, dtype, limit=limit)
            within(f"mlp, {rows} rows", op.run(x, packed, linear), exact, off)


def mlp_bits(op: MLP[Opaque]) -> None:
    linear = torch_linear()
    packed = op.pack(randn(86, 29), randn(29, 43, seed=1), linear)
    x = _far_into_silu(21, 29)
    whole = op.run(x, packed, linear)
    for part in (slice(0, 1), slice(3, 8)):
        require(torch.equal(op.run(x[part], packed, linear), whole[part]), "mlp: a row's bits")


def _far_into_silu(rows: int, width: int) -> Tensor:
    """Strided, and far into both ends of silu."""
    return 40 * randn(rows, width + 2, seed=2)[:, 1:-1]


def rms_norm(
    op: RMSNorm, dtype: torch.dtype = torch.float32, widths: Sequence[int] = (13, 37, 128)
) -> None:
    sizes = torch.tensor([1e-4, 1e-2, 1, 10, 1e3, 1, 1, 1, 1])[:, None]
    for width in widths:
        x = (randn(9, width + 1)[:, 1:] * sizes).to(dtype)
        weight = (0.5 + randn(width, seed=2).abs()).to(dtype)
        heads = randn(4, 3, width + 3, seed=3).to(dtype)[..., 1:-2]
        for eps in (1e-6, 1e-2):
            for given in (x, x.T.contiguous().T, heads):
                _normed(f"rms_norm, width {width}", op.run(given, weight, eps), given, weight, eps)
            total, normed = op.run_sum(x, x.flip(0), weight, eps)
            require(torch.equal(total, x + x.flip(0)), f"rms_norm, width {width}: the sum")
            _normed(f"rms_norm, of a sum, width {width}", normed, total, weight, eps)


def _normed(what: str, ours: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    if x.dtype == torch.float32:
        exact = rms_norm_reference.run(x.double(), weight.double(), eps)
        close(what, ours, exact, bounds.norm_bound(x.shape[-1]))
    else:
        rounded_alike(what, ours, rms_norm_reference.run(x, weight, eps))


def rope(op: Rope, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (3, 10)) -> None:
    """`dims`: heads, and the channels of each that rotate."""
    heads, width = dims
    x = randn(width + 4, heads, 7).to(dtype).permute(2, 1, 0)[..., 2:-2]  # strided
    angles = 100 * randn(7, width // 2, seed=3)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    before = x.clone()
    off = bounds.rounding(ROTATION) + (bounds.unit(dtype) if bounds.narrow(dtype) else 0.0)
    pairings: tuple[Pairing, ...] = ("interleaved", "half-split")
    for pairing in pairings:
        ours = op.run(x, cos, sin, pairing)
        exact = rope_reference.run(x.double(), cos.double(), sin.double(), pairing)
        close(f"rope, {pairing}", ours, exact, off)
        require(torch.equal(x, before), "rope writes its input")


# -- experts ---------------------------------------------------------------------------

ROUTERS = {
    "v2 greedy": RouterSpec(scoring="softmax", correction_bias=False, num_groups=1, top_groups=1,
                            group_score=None, top_k=3, renormalise=False, scaling_factor=16.0),
    "v2 groups": RouterSpec(scoring="softmax", correction_bias=False, num_groups=4, top_groups=2,
                            group_score="max", top_k=3, renormalise=False, scaling_factor=1.0),
    "v3": RouterSpec(scoring="sigmoid", correction_bias=True, num_groups=4, top_groups=2,
                     group_score="top2_sum", top_k=3, renormalise=True, scaling_factor=2.5),
    "k2": RouterSpec(scoring="sigmoid", correction_bias=True, num_groups=1, top_groups=1,
                     group_score=None, top_k=5, renormalise=True, scaling_factor=2.827),
    "v4": RouterSpec(scoring="sqrtsoftplus", correction_bias=True, num_groups=1, top_groups=1,
                     group_score=None, top_k=3, renormalise=True, scaling_factor=1.5),
    "v4 hashed": RouterSpec(scoring="sqrtsoftplus", correction_bias=False, num_groups=1,
                            top_groups=1, group_score=None, top_k=3, renormalise=True,
                            scaling_factor=1.5, hashed=True),
}  # fmt: skip


def route(
    op: Route[Opaque],
    dtype: torch.dtype = torch.float32,
    routers: Mapping[str, RouterSpec] = ROUTERS,
    dims: tuple[int, int] = (12, 37),
) -> None:
    """`dims`: experts, and channels of the tokens that choose among them."""
    count, hidden = dims
    logits, bias = 2 * randn(8, count), 0.3 * randn(count, seed=1)
    kinds = {
        "random": (logits, bias),
        "negative bias": (logits, bias - 5),
        "underflow": (logits - 150, bias),
        "ties": (torch.zeros(2, count), torch.zeros(count)),
    }
    for name, router in routers.items():
        for kind, (scores, added) in kinds.items():
            given = added if router.correction_bias else None
            routed(f"route, {name}, {kind}", op.run, scores, scores, given, router)
        if router.scoring == "sqrtsoftplus":  # the others' scores are equal there, or nothing
            far = torch.linspace(-90, 90, 2 * count).view(2, count)
            given = bias if router.correction_bias else None
            routed(f"route, {name}, far", op.run, far, far, given, router)
            routed(f"route, {name}, far below", op.run, far[:1], far[:1], given, router)
        given = bias if router.correction_bias else None
        what = f"route from tokens, {name}"
        _from_tokens(op, what, logits[:3], hidden, given, router, dtype)


def routed(
    what: str,
    run: Callable[..., tuple[Tensor, Tensor]],
    given: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    router: RouterSpec,
    off: Tensor | float = 0.0,
) -> None:
    """`run(given, …)` makes what the reference makes of `logits`, of which it may be `off`."""
    ids, weights = run(given, bias, router)
    exact_ids, exact = route_reference.run(logits.double(), bias, router)
    require(torch.equal(ids, exact_ids), f"{what}: other experts")
    within(f"{what}: weights", weights, exact, _off_weights(logits, exact, off))
    forced = (exact_ids + 1) % logits.shape[1]
    got, weights = run(given, bias, router, forced)
    _, exact = route_reference.run(logits.double(), bias, router, forced)
    require(torch.equal(got, forced), f"{what}: forced experts are not taken")
    within(f"{what}: forced", weights, exact, _off_weights(logits, exact, off))


def _off_weights(logits: Tensor, exact: Tensor, off: Tensor | float) -> Tensor:
    """Exponents lose as many units as their arguments are large; a score and the sum that it is
    divided by may be off by a logit's error each."""
    below = logits - logits.amax(-1, keepdim=True)
    argument = below.abs().maximum(logits.abs()).amax(-1, keepdim=True).double()
    relative = bounds.sum_bound(logits.shape[1]) + bounds.unit() * (2 * bounds.AROUND + argument)
    # scores that float32 has no digits of may be nothing, whose sum is 1e-20
    nothing = torch.finfo(torch.float32).tiny / 1e-20
    return (relative + 2 * off) * exact.double() + nothing


_PARTS = 3


def _choose(
    op: Route[Opaque],
    packed: Opaque,
    x: Tensor,
    bias: Tensor | None,
    router: RouterSpec,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return op.choose(x, packed, torch_linear(), bias, router, forced)


def _from_tokens(
    op: Route[Opaque],
    what: str,
    wanted: Tensor,
    hidden: int,
    bias: Tensor | None,
    router: RouterSpec,
    dtype: torch.dtype,
) -> None:
    """Tokens that give about these logits; the weight has all the digits of float32, most of them,
    or those of the tokens."""
    inner = randn(wanted.shape[1], hidden, seed=7)
    x = (wanted @ torch.linalg.pinv(inner).T).to(dtype)
    for weight in (inner, (inner * 2**20).round() / 2**20, inner.to(dtype).float()):
        packed = op.pack(weight, dtype, torch_linear())
        run = partial(_choose, op, packed)

        # 16-bit parts of a weight are terms of their own
        off = _PARTS * bounds.gemm(x, weight, dtype).amax(-1, keepdim=True)
        routed(what, run, x, x.double() @ weight.double().T, bias, router, off)


def experts(
    op: Experts[Opaque],
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int, int] = (12, 29, 17),
    chosen: int = 3,
    limit: float | None = None,
) -> None:
    """`dims`: experts, hidden size, width. The first and the last third are held."""
    E, D, W = dims
    gate_up = (randn(E, 2 * W, D) * (math.sqrt(29 / D) / 5)).to(dtype)
    down = (randn(E, D, W, seed=1) * (math.sqrt(17 / W) / 4)).to(dtype)
    for first in (0, E // 3):
        held = slice(first, first + E - E // 3)
        packed = op.pack(gate_up[held], down[held], torch_linear(), limit)
        for tokens in (1, 2, 33):
            what = f"experts, from {first}, {tokens} tokens"
            _experts(op, what, tokens, gate_up, down, held, packed, None, chosen, limit)
            times = {(0, 33): 2, (4, 2): 1}.get((first, tokens))
            if times and "pack_with_shared" in op.capabilities.optional:
                shared = (
                    (randn(2 * times * W, D, seed=5) * (math.sqrt(29 / D) / 5)).to(dtype),
                    (randn(D, times * W, seed=6) * (math.sqrt(17 / W) / 4)).to(dtype),
                )
                sharing = cast("SharedExperts[Opaque]", op)
                weights = (gate_up[held], down[held], *shared)
                more = sharing.pack_with_shared(*weights, torch_linear(), limit)
                what = f"{what}, {times} shared"
                _experts(op, what, tokens, gate_up, down, held, more, shared, chosen, limit)


def _experts(
    op: Experts[Opaque],
    what: str,
    tokens: int,
    gate_up: Tensor,
    down: Tensor,
    held: slice,
    packed: Opaque,
    shared: tuple[Tensor, Tensor] | None,
    chosen: int,
    limit: float | None,
) -> None:
    K, (E, D, _) = chosen, down.shape
    x, weights = randn(tokens, D, seed=2).to(down.dtype), randn(tokens, K, seed=3).abs() * 2.5
    ids = randn(tokens, E, seed=4).argsort(1)[:, :K]
    first = held.start
    packed_here = experts_reference.pack(gate_up[held], down[held], None, limit)
    exact = experts_reference.run(x.double(), ids, weights.double(), packed_here, None, first)
    off = experts_bound(x, ids - first, weights, gate_up[held], down[held], limit=limit)
    if shared is not None:
        beside = mlp_reference.run(x.double(), mlp_reference.pack(*shared, None, limit), None)
        more = bounds.mlp(x, *shared, x.dtype, limit=limit)
        off += more + bounds.rounding(1) * beside.abs()
        exact += beside
    off += bounds.stored(exact, x.dtype)
    ours = op.run(x, ids, weights, packed, torch_linear(), first)
    zero = exact.norm(dim=-1) == 0  # tokens whose experts are all elsewhere
    require(bool((ours[zero] == 0).all()), f"{what}: others' experts")
    within(what, ours[~zero], exact[~zero], off[~zero])
    if "run_added" in op.capabilities.optional:
        adding, added = cast("AddingExperts[Opaque]", op), randn(tokens, D, seed=8).to(x.dtype)
        ours = adding.run_added(
            x, ids, weights, lambda: lambda: added, packed, torch_linear(), first
        )
        exact = exact + added.double()
        within(f"{what}, and more", ours, exact, off + bounds.stored(exact, x.dtype))


def experts_bound(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    rounded: torch.dtype = torch.float32,
    limit: float | None = None,
) -> Tensor:
    """Of the weighted sum over experts; ids that name none here add nothing. `rounded`: what
    numbers of the weights may have been rounded to before; `limit` of gates and ups."""
    off = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            each = bounds.mlp(x[tokens], gate_up[expert], down[expert], x.dtype, rounded, limit)
            packed = mlp_reference.pack(gate_up[expert], down[expert], None, limit)
            size = mlp_reference.run(x[tokens].double(), packed, None)
            each = each + bounds.rounding(bounds.AROUND) * size.abs()
            off.index_add_(0, tokens, weights[tokens, places, None].double() * each)
    return off
