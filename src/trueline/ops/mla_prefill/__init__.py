"""Causal latent attention of runs of new positions over everything cached so far, which includes
the new positions themselves.

`prepare(parts, view, heads, decode, form=None)` once a step, for all prefill rows: each part has
its `tokens` (a slice of the step's n) and its `row`. `run(q_nope [n, heads, nope], q_rope
[n, heads, rope], view, prepared, heads, out [n, heads, value], softmax_scale=…)` per layer writes
the parts' tokens of `out` and no others. `softmax_scale` has no default.

Both forms give the same numbers: `expanded` makes keys and values per head, `absorbed` moves
queries into the latent; without a form each row takes the cheaper one. `decode` is the chosen
mla_decode, for implementations in which rows of a few tokens are decode rows.

Optional: `prepare_chosen(parts, view, heads)` and `run_chosen(…, out, positions [m, k],
softmax_scale=…)`, the same for rows whose tokens see only what they chose: positions as
`sparse_mla` takes them, in which the tokens of a part have the rows from `chosen` on. Tokens that
chose nothing get zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.device import runs_gluon
from trueline.ops.capabilities import (
    CPU,
    GPU_LATENT,
    HALF_PRECISION,
    Capabilities,
    Context,
    HeadDims,
    fp8_latent_refusals,
)
from trueline.ops.mla_decode import MLADecodeOp

Form = Literal["expanded", "absorbed"]

FEW = 16
"""New tokens of a row up to which it attends in the latent on a GPU. Expanding costs the same for
one query as for many; in the latent every query costs 3.4 times as much and reads the cache by
itself."""
MASKED_SPEED = 1.85
"""Multiplications of `run_chosen`, which reads keys in their order and hides those not chosen, in
the time of one of `sparse_mla`, which gathers the chosen ones for every token."""
HOPPER_MASKED_SPEED = 1.3
"""The same on Hopper GPUs, where both have kernels of their own at the dims of large models."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """New positions start..start+count of one request, and the blocks that hold all of them."""

    start: int
    count: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """kv_b_proj, split: `key` [heads, latent, nope], `value` [heads, value, latent]."""

    key: Tensor
    value: Tensor


class Part(Protocol):
    """Where a row's tokens stand among those of the step."""

    @property
    def tokens(self) -> slice: ...

    @property
    def row(self) -> PrefillRow: ...

    @property
    def chosen(self) -> int: ...


Prepared = TypeVar("Prepared")


class MLAPrefill(Protocol[Prepared]):
    capabilities: Capabilities

    def prepare(
        self,
        parts: Sequence[Part],
        view: LatentView,
        heads: HeadDims,
        decode: MLADecodeOp,
        form: Form | None = None,
    ) -> Prepared: ...

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        view: LatentView,
        prepared: Prepared,
        heads: HeadWeights,
        out: Tensor,
        *,
        softmax_scale: float,
    ) -> None: ...


class MaskedPrefill(MLAPrefill[Prepared], Protocol[Prepared]):
    def prepare_chosen(
        self, parts: Sequence[Part], view: LatentView, heads: HeadDims
    ) -> Prepared: ...

    def run_chosen(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        view: LatentView,
        prepared: Prepared,
        heads: HeadWeights,
        out: Tensor,
        positions: Tensor,
        *,
        softmax_scale: float,
    ) -> None: ...


def _hopper_refusals(context: Context) -> list[str]:
    from trueline.ops.mla_prefill.cut import hopper_refusals  # which needs this module

    return hopper_refusals(context) or fp8_latent_refusals(context)


_MASKED = replace(GPU_LATENT, optional=("prepare_chosen", "run_chosen"))
IMPLEMENTATIONS = {
    "cpu": CPU,
    "reference": CPU,
    "hopper": replace(_MASKED, dtypes=HALF_PRECISION, refuses=_hopper_refusals),
    "triton": _MASKED,
}


def cheaper_form(heads: HeadDims, layout: LatentLayout, count: int, context: int) -> Form:
    """By multiplications: expanding costs once per cached position, absorbing once per query."""
    latent, rope, nope, value = layout.latent, layout.rope, heads.nope, heads.value
    expanded = context * latent * (nope + value) + count * context * (nope + rope + value)
    absorbed = count * latent * (nope + value) + count * context * (2 * latent + rope)
    return "expanded" if expanded <= absorbed else "absorbed"


def masked_context(layout: LatentLayout, nope: int, value: int, topk: int, count: int) -> int:
    """The longest context over which `run_chosen` costs no more than `sparse_mla`, for `count`
    tokens that see topk positions each. By multiplications: here every position is expanded once
    and every pair computed, there every token is moved into the latent and meets topk positions."""
    expand = layout.latent * (nope + value)
    masked = expand + count * (nope + layout.rope + value)
    selected = count * (expand + topk * (2 * layout.latent + layout.rope))
    speed = HOPPER_MASKED_SPEED if runs_gluon() else MASKED_SPEED
    return int(speed * selected / masked)
