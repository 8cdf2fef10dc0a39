"""Causal latent attention of a run of new positions over everything cached so far, which includes
the new positions themselves.

`run(q [tokens, heads, nope + rope], view, row, heads, softmax_scale=…, form=…)` ->
out [tokens, heads, value]. Both forms give the same numbers: `expanded` makes keys and values per
head, `absorbed` moves queries into the latent. `softmax_scale` has no default.

An implementation may also have `run_rows(q_nope [n, heads, nope], q_rope [n, heads, rope], view,
parts, heads, out [n, heads, value], softmax_scale=…)`, which takes all prefill rows of a step at
once, each with its `tokens` (a slice of n) and its `row`, in the forms it likes. It writes their
tokens of `out` and no others; the layers of a step hand over the same `parts`.

And it may have `run_chosen(…, out, positions [m, k], softmax_scale=…)`, the same for rows whose
tokens see only what they chose: positions as `sparse_mla` takes them, in which the tokens of a part
have the rows from `chosen` on. Tokens that chose nothing get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.device import runs_gluon

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


def cheaper_form(heads: HeadWeights, rope: int, count: int, context: int) -> Form:
    """By multiplications: expanding costs once per cached position, absorbing once per query."""
    latent, nope, value = heads.key.shape[1], heads.key.shape[2], heads.value.shape[1]
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
