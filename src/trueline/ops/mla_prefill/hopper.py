"""The warp-specialised kernel for Hopper GPUs (hopper_kernels.py) in place of the portable one. The
rest is triton.py's: which keys are expanded at a time, and rows of a few tokens, which the chosen
mla_decode takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import HeadDims
from trueline.ops.launch import can_copy, unit_stride
from trueline.ops.mla_decode import MLADecodeOp
from trueline.ops.mla_prefill import IMPLEMENTATIONS, Form, HeadWeights, Part, triton
from trueline.ops.mla_prefill.cut import PrefillLaunchPlan, hopper_launch
from trueline.ops.mla_prefill.triton import Prepared

capabilities = IMPLEMENTATIONS["hopper"]


def prepare(
    parts: Sequence[Part],
    view: LatentView,
    heads: HeadDims,
    decode: MLADecodeOp,
    form: Form | None = None,
) -> Prepared:
    return triton.prepare(parts, view, heads, decode, form, _plan(view, heads))


def prepare_chosen(parts: Sequence[Part], view: LatentView, heads: HeadDims) -> Prepared:
    return triton.prepare_chosen(parts, view, heads, _plan(view, heads))


def _plan(view: LatentView, heads: HeadDims) -> PrefillLaunchPlan:
    return hopper_launch(heads, view.layout.rope, view.dtype)


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    prepared: Prepared,
    heads: HeadWeights,
    out: Tensor,
    *,
    softmax_scale: float,
) -> None:
    if prepared.cut is not None:
        q_nope, q_rope = _copied_ahead(q_nope, q_rope)
    triton.run(
        q_nope, q_rope, view, prepared, heads, out, softmax_scale=softmax_scale, kernel=_attend
    )


def run_chosen(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    prepared: Prepared,
    heads: HeadWeights,
    out: Tensor,
    positions: Tensor,
    *,
    softmax_scale: float,
) -> None:
    q_nope, q_rope = _copied_ahead(q_nope, q_rope)
    triton.run_chosen(
        q_nope, q_rope, view, prepared, heads, out, positions,
        softmax_scale=softmax_scale, kernel=_attend,
    )  # fmt: skip


def _copied_ahead(q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that the producer warps can copy asynchronously."""
    q_nope, q_rope = unit_stride(q_nope), unit_stride(q_rope)
    if can_copy(q_nope, q_rope):
        return q_nope, q_rope
    return q_nope.contiguous(), q_rope.contiguous()


def _attend(
    programs: int,
    operands: tuple[Tensor, ...],
    bits: Tensor | None,
    arguments: tuple[object, ...],
    dims: tuple[int, int, int],
    plan: PrefillLaunchPlan,
) -> None:
    from trueline.ops.mla_prefill.hopper_kernels import (
        attend_warp_specialised,  # Gluon is not everywhere
    )

    some = operands[-1] if bits is None else bits  # any pointer will do where nothing is chosen
    attend_warp_specialised[(programs,)](
        *operands, some, *arguments, *dims, HEADS=plan.heads, CHOSEN=bits is not None
    )
