"""Keys and values per head, computed by GEMMs for as many positions as fit the workspace
(cut.py), and one causal kernel over them (kernels.py). Rows of a few new tokens do without: each
token attends as a decode row, in the latent. Tokens that chose what they see have a bit for every
position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import HeadDims, Opaque
from trueline.ops.latent_pointers import latent_places, latent_pointers
from trueline.ops.launch import copied, power_of_two, unit_stride
from trueline.ops.mla_decode import DecodeRows, MLADecodeOp, Tiling
from trueline.ops.mla_prefill import FEW, IMPLEMENTATIONS, Form, HeadWeights, Part
from trueline.ops.mla_prefill.cut import (
    GATHERED,
    PICKED,
    Cut,
    Lists,
    PrefillLaunchPlan,
    launch,
    lists,
    picks,
)
from trueline.ops.mla_prefill.kernels import BITS, attend, gather, set_bits

capabilities = IMPLEMENTATIONS["triton"]

LEAST_DIM = 16
CHUNK = 2048
"""Chosen positions looked at together."""
TILING = Tiling(64, full=False)


class Kernel(Protocol):
    """Launches one of the kernels that attend over expanded keys and values."""

    def __call__(
        self,
        programs: int,
        operands: tuple[Tensor, ...],
        bits: Tensor | None,
        arguments: tuple[object, ...],
        dims: tuple[int, int, int],
        plan: PrefillLaunchPlan,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all layers of a step share."""

    few: Sequence[Part]
    decode: tuple[MLADecodeOp, Opaque] | None
    """The mla_decode that takes the rows of a few tokens, and what it has prepared."""
    cut: Cut | None
    picks: Tensor | None = None  # [programs of set_bits / PICKED, 4]
    words: int = 0
    """Of bits, for a token."""


def prepare(
    parts: Sequence[Part],
    view: LatentView,
    heads: HeadDims,
    decode: MLADecodeOp,
    form: Form | None = None,
    plan: PrefillLaunchPlan | None = None,
) -> Prepared:
    """The launch plan is the portable kernel's unless one is given."""
    few: list[Part] = []
    many: list[Part] = []
    for part in parts:
        short = part.row.count <= FEW if form is None else form == "absorbed"
        (few if short else many).append(part)
    rows = None
    if few:
        rows = decode, decode.prepare(_decode_rows(few), view, TILING, heads.count)
    plan = plan or launch(heads, view.layout.rope, view.dtype)
    return Prepared(few, rows, lists(many, plan, view.rows.device) if many else None)


def prepare_chosen(
    parts: Sequence[Part], view: LatentView, heads: HeadDims, plan: PrefillLaunchPlan | None = None
) -> Prepared:
    plan = plan or launch(heads, view.layout.rope, view.dtype)
    made = lists(parts, plan, view.rows.device)
    longest = max(part.row.start + part.row.count for part in parts)
    words = (longest + plan.keys) // BITS.value + 2  # a tile may begin at the last position
    picked = copied([picks(parts)], view.rows.device)[0].view(-1, 4)
    return Prepared((), None, made, picked, words)


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    prepared: Prepared,
    heads: HeadWeights,
    out: Tensor,
    *,
    softmax_scale: float,
    kernel: Kernel | None = None,
) -> None:
    if prepared.decode is not None:
        decode, rows = prepared.decode
        slices = [part.tokens for part in prepared.few]
        q = _absorbed(q_nope, q_rope, slices, heads)
        u, _ = decode.run(q, view, rows, softmax_scale=softmax_scale)
        made = torch.bmm(u.transpose(0, 1), heads.value.mT).transpose(0, 1)
        sizes = [part.row.count for part in prepared.few]
        for at, some in zip(slices, torch.split(made, sizes), strict=True):
            out[at] = some
    if prepared.cut is not None:
        _expanded(q_nope, q_rope, view, prepared.cut, heads, out, softmax_scale, None, kernel)


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
    kernel: Kernel | None = None,
) -> None:
    assert prepared.cut is not None
    bits = _bits(unit_stride(positions), prepared, len(q_nope))
    _expanded(q_nope, q_rope, view, prepared.cut, heads, out, softmax_scale, bits, kernel)


def _bits(positions: Tensor, given: Prepared, tokens: int) -> Tensor:
    """[tokens, words]: a bit for every position, and a last word that is 0."""
    assert given.picks is not None
    bits = positions.new_zeros(tokens, given.words, dtype=torch.int32)
    width = positions.shape[1]
    set_bits[(len(given.picks) * PICKED,)](
        positions, given.picks, bits, width, positions.stride(0), given.words,
        ROWS=PICKED, CHUNK=min(max(power_of_two(width), 16), CHUNK), num_warps=8,
    )  # fmt: skip
    return bits


def _decode_rows(parts: Sequence[Part]) -> DecodeRows:
    """A row for every token: each sees one position more."""
    rows = [part.row for part in parts]
    lengths = [row.start + 1 + i for row in rows for i in range(row.count)]
    return DecodeRows(lengths, [row.block_ids for row in rows for _ in range(row.count)])


def _absorbed(q_nope: Tensor, q_rope: Tensor, slices: list[slice], heads: HeadWeights) -> Tensor:
    plain = torch.cat([q_nope[at] for at in slices]).transpose(0, 1)
    moved = torch.bmm(plain, heads.key.mT).transpose(0, 1)
    return torch.cat((moved, torch.cat([q_rope[at] for at in slices])), dim=-1)


def _expanded(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    cut: Cut,
    heads: HeadWeights,
    out: Tensor,
    softmax_scale: float,
    bits: Tensor | None,
    kernel: Kernel | None,
) -> None:
    q_nope, q_rope = unit_stride(q_nope), unit_stride(q_rope)
    count, _, nope = heads.key.shape
    dims = (nope, view.layout.rope, heads.value.shape[1])
    kept = cut.state.stop - cut.state.start
    state = q_nope.new_empty(kept, count, dims[2], dtype=torch.float32)
    state_lse = q_nope.new_empty(kept, count, dtype=torch.float32)
    words = 0 if bits is None else bits.shape[1]
    assert out.is_contiguous()
    for chunk in cut.chunks:
        latent, ropes = _gathered(view, cut, chunk)
        wide = latent.expand(count, -1, -1)
        keys, values = torch.bmm(wide, heads.key), torch.bmm(wide, heads.value.mT)
        arguments = (
            out, state, state_lse, softmax_scale * math.log2(math.e), len(chunk.tiles), count,
            chunk.total, cut.state.start, words, q_nope.stride(0), q_nope.stride(1),
            q_rope.stride(0), q_rope.stride(1),
        )  # fmt: skip
        operands = (q_nope, q_rope, keys, ropes, values, chunk.tiles)
        (kernel or _portable)(len(chunk.tiles) * count, operands, bits, arguments, dims, cut.plan)


def _portable(
    programs: int,
    operands: tuple[Tensor, ...],
    bits: Tensor | None,
    arguments: tuple[object, ...],
    dims: tuple[int, int, int],
    plan: PrefillLaunchPlan,
) -> None:
    P, R, V = (max(power_of_two(dim), LEAST_DIM) for dim in dims)
    attend[(programs,)](
        *operands, bits, *arguments, *dims, P=P, R=R, V=V, Q=plan.queries, N=plan.keys,
        HEADS=plan.heads, STAGES=plan.stages, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def _gathered(view: LatentView, cut: Cut, chunk: Lists) -> tuple[Tensor, Tensor]:
    """The cached rows of a chunk's positions side by side: latent and rotated parts."""
    layout = view.layout
    latent = view.rows.new_empty(chunk.total, layout.latent, dtype=view.dtype)
    ropes = view.rows.new_empty(chunk.total, layout.rope, dtype=view.dtype)
    gather[(len(chunk.places),)](
        *latent_pointers(view), cut.blocks, chunk.places, latent, ropes, **latent_places(view),
        LATENT=layout.latent, ROPE=layout.rope, L=power_of_two(layout.latent),
        R=power_of_two(layout.rope), COUNT=GATHERED, BLOCK=layout.block_size,
    )  # fmt: skip
    return latent, ropes
