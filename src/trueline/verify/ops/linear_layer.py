"""What stands around linear attention: its inputs and its gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from trueline.ops.gated_norm import GatedNorm
from trueline.ops.gated_norm import reference as norm_reference
from trueline.ops.latent_write import Parts
from trueline.ops.qkv_prepare import QKVPrepare
from trueline.ops.qkv_prepare import reference as inputs_reference
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing
from trueline.verify.bounds import AROUND, norm_bound, rounding
from trueline.verify.ops.basic import ROTATION
from trueline.verify.ops.data import randn, require, rounded_alike, within

HEADS, D = 5, 14
PARTS = Parts(rms_norm, rope)


Turn = tuple[Pairing, int] | None
ROTATIONS: tuple[Turn, ...] = (("interleaved", 3), ("half-split", 3), ("half-split", 7), None)


def qkv_prepare(
    op: QKVPrepare,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (HEADS, D),
    rotations: tuple[Turn, ...] = ROTATIONS,
) -> None:
    """All that a model may leave out, on columns of one wider projection; both ends of silu.
    `dims`: heads, and channels of each."""
    heads, width = dims
    # an error of silu is less than a unit of the row's largest
    accepted = norm_bound(width) + rounding(ROTATION + 2 * AROUND)
    for n, rotation in zip((1, 4, 9, 3), rotations, strict=False):
        for silu, normed in ((False, True), (True, False), (True, True), (False, False)):
            whole = (8 * randn(n, 3 * heads * width + 5, seed=n)).to(dtype)
            qkv = whole[:, 2:-3]
            q_norm, k_norm = ((0.5 + randn(width, seed=i).abs()).to(dtype) for i in (2, 3))
            run = partial(
                _prepared,
                heads=heads,
                eps=1e-2 * n,
                qkv=qkv,
                silu=silu,
                norms=(q_norm, k_norm) if normed else None,
                rope=rotation and (*_angles(n, rotation[1]), rotation[0]),
            )
            before = whole.clone()
            ours = run(op)
            require(torch.equal(whole, before), "qkv_prepare: writes its input")
            exact = run(inputs_reference)
            for name, mine, wanted in zip("qkv", ours, exact, strict=True):
                what = f"qkv_prepare, {n} tokens, {rotation}, silu {silu}, norms {normed}: {name}"
                _same(what, mine, wanted, accepted * wanted.double().abs())


def _prepared(
    op: QKVPrepare,
    heads: int,
    eps: float,
    qkv: Tensor,
    silu: bool,
    norms: tuple[Tensor, Tensor] | None,
    rope: tuple[Tensor, Tensor, Pairing] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return op.run(qkv, heads=heads, silu=silu, norms=norms, eps=eps, rope=rope, parts=PARTS)


def _angles(n: int, half: int) -> tuple[Tensor, Tensor]:
    angles = 100 * randn(n, half, seed=4)
    return 1.3 * angles.cos(), 1.3 * angles.sin()


def _same(what: str, ours: Tensor, wanted: Tensor, accepted: Tensor) -> None:
    require(ours.dtype == wanted.dtype, f"{what}: in {ours.dtype}")
    if wanted.dtype == torch.float32:
        within(what, ours, wanted, accepted)
    else:
        rounded_alike(what, ours, wanted)


def gated_norm(
    op: GatedNorm,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, int, int]] = ((1, 1, 37), (4, 6, 11), (9, 2, 130), (3, 17, 1)),
) -> None:
    """Groups of one channel up to all of them, small and large; columns of one wider projection.
    `shapes`: tokens, groups, channels of a group."""
    for n, groups, width in shapes:
        channels = groups * width
        whole = (4 * randn(n, 2 * channels + 5, seed=n)).to(dtype)
        x, gate = whole[:, 1 : channels + 1], whole[:, -channels - 2 : -2]
        x[0] /= 16
        eps = 1e-2 * n
        weight = (0.5 + randn(channels, seed=2).abs()).to(dtype)
        before = whole.clone()
        for given in (x, x.T.contiguous().T):
            ours = op.run(given, gate, weight=weight, groups=groups, eps=eps, parts=PARTS)
            what = f"gated_norm, {n} tokens, {groups} groups"
            wanted = norm_reference.run(x, gate, weight=weight, groups=groups, eps=eps, parts=PARTS)
            # the sigmoid's exp loses as many units as its argument is large
            relative = norm_bound(width) + rounding(2 * AROUND) + rounding(1) * gate.abs()
            _same(what, ours, wanted, relative * wanted.double().abs())
        require(torch.equal(whole, before), "gated_norm: writes its input")
