"""Residual streams, against their float64 reference: streams of very different sizes, tokens so
small that a norm's eps counts, and matrices that Sinkhorn's iterations leave unfinished: one more
or less shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trueline.ops.hyper_connections import HyperConnections, Mixed
from trueline.ops.hyper_connections import reference as exactly
from trueline.ops.rms_norm import reference as rms_norm
from trueline.verify import bounds
from trueline.verify.ops.data import randn, require, within

PARTS = ("x", "post", "carry")
NEVER = -20.0
"""Below the diagonal: with zeros there, columns and rows agree only after very many iterations."""


@dataclass(frozen=True)
class Case:
    what: str
    h: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    iterations: int

    @property
    def streams(self) -> int:
        return self.h.shape[1]

    @property
    def sizes(self) -> list[int]:
        return [self.streams, self.streams, self.streams**2]

    def mixed(self, op: HyperConnections, rows: slice = slice(None)) -> Mixed:
        given = (self.h[rows], self.fn, self.base, self.scale)
        return op.mix(*given, norm_eps=self.norm_eps, eps=self.eps, iterations=self.iterations)

    @property
    def weight(self) -> Tensor:
        return 1 + 0.5 * randn(self.h.shape[2], seed=5).to(self.h.dtype)

    def advanced(
        self, op: HyperConnections, y: Tensor, mixed: Mixed, rows: slice = slice(None)
    ) -> tuple[Tensor, Mixed]:
        return op.advance(
            *(self.h[rows], y, mixed, self.fn, self.base, self.scale, self.weight),
            norm=rms_norm,
            norm_eps=self.norm_eps,
            eps=self.eps,
            iterations=self.iterations,
        )

    def head(self, op: HyperConnections, rows: slice = slice(None)) -> Tensor:
        given = (self.h[rows], self.fn[: self.streams], self.base[: self.streams], self.scale[:1])
        return op.head(*given, norm_eps=self.norm_eps, eps=self.eps)

    def exact(self) -> Case:
        h, fn, base, scale = (x.double() for x in (self.h, self.fn, self.base, self.scale))
        return replace(self, h=h, fn=fn, base=base, scale=scale)


SHAPES = (
    (4, 37, 5, 1e-6, 1e-6, 20),
    (4, 29, 1, 1e-2, 3e-2, 3),
    (4, 256, 2, 1e-6, 1e-6, 20),
    (3, 67, 19, 1e-6, 1e-3, 4),
    (2, 13, 33, 1e-3, 1e-6, 1),
)
"""Streams, width, tokens; eps of the norm and of the mixing, iterations."""
Shape = tuple[int, int, int, float, float, int]


def cases(dtype: torch.dtype, shapes: Sequence[Shape] = SHAPES) -> Iterator[Case]:
    for streams, width, tokens, norm_eps, eps, iterations in shapes:
        made = streams * (2 + streams)
        sizes = torch.tensor([0.05, 1.0, 40.0, 1e-3])[:streams, None]
        small = torch.ones(tokens, 1, 1)
        small[1::3] = 1e-2 if bounds.narrow(dtype) else 1e-4  # what float16 has digits for
        h = randn(tokens, streams, width + 3, seed=1)[..., 1:-2] * sizes * small
        fn = randn(made, streams * width, seed=2) / math.sqrt(streams * width)
        base = 0.7 * randn(made, seed=3)
        base[2 * streams :].view(streams, streams).add_(
            NEVER * torch.ones(streams, streams).tril(-1)
        )
        scale = torch.tensor([1.3, -0.8, 1.7])
        what = f"{streams} streams of {width}, {tokens} tokens"
        yield Case(what, h.to(dtype), fn, base, scale, norm_eps, eps, iterations)


def hyper_connections(
    op: HyperConnections, dtype: torch.dtype = torch.float32, shapes: Sequence[Shape] = SHAPES
) -> None:
    for case in cases(dtype, shapes):
        what, h = f"hyper_connections, {case.what}", case.h
        ours, exact, off = case.mixed(op), case.exact().mixed(exactly), mix_bound(case)
        require(ours.x.dtype == dtype, f"{what}: x is {ours.x.dtype}")
        require(ours.post.dtype == ours.carry.dtype == torch.float32, f"{what}: not float32")
        within(f"{what}: post", ours.post, exact.post, off.post)
        within(f"{what}: carry", ours.carry, exact.carry, off.carry)
        within(f"{what}: x", ours.x, exact.x, off.x + bounds.stored(exact.x, dtype))
        made = case.exact().head(exactly)
        within(f"{what}: head", case.head(op), made, off.x + bounds.stored(made, dtype))
        y = 3 * randn(len(h), h.shape[2], seed=4).to(dtype)
        given = Mixed(y, exact.post.float(), exact.carry.float())
        merged = exactly.merge(h.double(), y.double(), given)
        accepted = merge_bound(h, y, given) + bounds.stored(merged, dtype)
        within(f"{what}: merged", op.merge(h, y, given), merged, accepted)
        streams, mixed = case.advanced(op, y, given)
        within(f"{what}: advanced", streams, merged, accepted)
        # a mix of the streams that were rounded
        case = replace(case, h=streams)
        exact, off = case.exact().mixed(exactly), mix_bound(case)
        within(f"{what}: advanced, post", mixed.post, exact.post, off.post)
        within(f"{what}: advanced, carry", mixed.carry, exact.carry, off.carry)
        normed = rms_norm.run(exact.x, case.weight.double(), case.norm_eps)
        within(f"{what}: advanced, x", mixed.x, normed, normed_bound(case, exact.x, off.x))


def mix_bound(case: Case) -> Mixed:
    """Of x, post and carry. `x` is that of the head too, whose weights are those of pre."""
    h, scale, base = case.h.double(), case.scale.double(), case.base.double()
    flat = h.flatten(1)
    rms = (flat.square().mean(-1, keepdim=True) + case.norm_eps).sqrt()
    m = flat @ case.fn.double().T / rms
    off = bounds.gemm(flat, case.fn, torch.float32) / rms
    off = off + bounds.norm_bound(flat.shape[1]) * m.abs()
    factor = torch.repeat_interleave(scale, torch.tensor(case.sizes, device=scale.device))
    argument = m * factor + base
    off = off * factor.abs() + bounds.rounding(2) * ((m * factor).abs() + argument.abs())
    pre, post, carry = torch.split(argument, case.sizes, dim=-1)
    off_pre, off_post, off_carry = torch.split(off, case.sizes, dim=-1)
    weights = pre.sigmoid() + case.eps
    moved = _sigmoid_bound(pre, off_pre) + bounds.rounding(1) * weights
    summed = bounds.rounding(case.streams + 1) * weights
    off_x = ((moved + summed)[..., None] * h.abs()).sum(1)
    return Mixed(off_x, 2 * _sigmoid_bound(post, off_post), _carry_bound(case, carry, off_carry))


def _sigmoid_bound(x: Tensor, off: Tensor) -> Tensor:
    """exp loses as many units as its argument is large, of which a sigmoid near 1 shows little."""
    lost = (1 - x.sigmoid()) * (off + bounds.rounding(1) * x.abs())
    return x.sigmoid() * (lost + bounds.rounding(bounds.AROUND))


def _carry_bound(case: Case, logits: Tensor, off: Tensor) -> Tensor:
    """Normalising rows and columns takes from the logarithms' errors what a row or a column shares:
    what is left is no larger, in the mean weighted by the numbers themselves. Each of the divisions
    rounds once more, and the sum of the last."""
    n, streams = len(logits), case.streams
    logits, off = logits.view(n, streams, streams), off.view(n, streams, streams)
    off = off + bounds.rounding(1) * (logits.amax(-1, keepdim=True) - logits)
    off = off + bounds.rounding(bounds.AROUND + streams) + bounds.chain_bound(2 * case.iterations)
    carry = case.exact().mixed(exactly).carry
    return (carry * (carry * off.square()).sum((1, 2), keepdim=True)).sqrt()


def merge_bound(h: Tensor, y: Tensor, mixed: Mixed) -> Tensor:
    size = exactly.merge(h.double().abs(), y.double().abs(), mixed)
    return bounds.rounding(h.shape[1] + 2) * size


def normed_bound(case: Case, x: Tensor, off: Tensor) -> Tensor:
    """Of x after its norm, where it is off before: so is the root mean square that it is over."""
    dtype, weight = case.h.dtype, case.weight.double()
    off = off + bounds.stored(x, dtype)
    rms = (x.square().mean(-1, keepdim=True) + case.norm_eps).sqrt()
    unit = x / rms
    shared = off.square().mean(-1, keepdim=True).sqrt() / rms + bounds.norm_bound(x.shape[1])
    off = off / rms + shared * unit.abs() + bounds.stored(unit, dtype)
    made = (unit * weight).abs()
    return off * weight.abs() + bounds.rounding(1) * made + bounds.stored(made, dtype)


def bits(op: HyperConnections) -> None:
    """A token's bits do not depend on the tokens beside it."""
    for case in cases(torch.float32):
        whole, y = case.mixed(op), randn(len(case.h), case.h.shape[2], seed=4)
        merged, head = op.merge(case.h, y, whole), case.head(op)
        streams, mixed = case.advanced(op, y, whole)
        for part in (slice(0, 1), slice(3, 5), slice(17, 19), slice(31, 33)):
            mine = case.mixed(op, part)
            my_streams, my_mixed = case.advanced(op, y[part], mine, part)
            pairs = (
                *((getattr(mine, name), getattr(whole, name)) for name in PARTS),
                *((getattr(my_mixed, name), getattr(mixed, name)) for name in PARTS),
                (my_streams, streams),
                (op.merge(case.h[part], y[part], mine), merged),
                (case.head(op, part), head),
            )
            same = all(torch.equal(alone, together[part]) for alone, together in pairs)
            require(same, f"hyper_connections, {case.what}: a token's bits")
