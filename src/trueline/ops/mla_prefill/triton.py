"""Keys and values per head, made with matrix products for as many positions as fit the workspace
(cut.py), and one causal kernel over them (kernels.py). Rows of a few new tokens do without: each
token attends as a decode row, in the latent. Tokens that chose what they see have a bit for every
position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.launch import can_copy, power_of_two, refusals, unit_stride
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_prefill import FEW, Form, HeadWeights, PrefillRow
from trueline.ops.mla_prefill.cut import (
    GATHERED,
    PICKED,
    Cut,
    Lists,
    Part,
    aligned,
    launch,
    lists,
    picks,
)
from trueline.ops.mla_prefill.kernels import BITS, attend, gather, set_bits

__all__ = ["refusals", "run", "run_chosen", "run_rows"]

LEAST_DIM = 16
CHUNK = 2048
"""Chosen positions looked at together."""
TILING = Tiling(64, full=False)
Way = Form | Literal["chosen"]


@dataclass(frozen=True, slots=True)
class Slice:
    tokens: slice
    row: PrefillRow
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all layers of a step share."""

    few: Sequence[Part]
    decode: decode.Prepared | None
    cut: Cut | None
    picks: Tensor | None = None  # [programs of set_bits / PICKED, 4]
    words: int = 0
    """Of bits, for a token."""


@dataclass(slots=True)
class Latest:
    """The layers of a step ask one after the other, with the same parts."""

    asked: tuple[object, ...] = ()
    made: Prepared | None = None

    def prepared(
        self, parts: Sequence[Part], view: LatentView, heads: HeadWeights, way: Way | None
    ) -> Prepared:
        shape, device = (heads.key.shape, heads.value.shape), view.rows.device
        asked = (parts, view.layout, shape, view.rows.dtype, device, way)
        known = len(self.asked) == len(asked) and self.asked[0] is parts
        if self.made is None or not known or self.asked[1:] != asked[1:]:
            self.made, self.asked = prepare(parts, view, heads, way), asked
        return self.made


LATEST, LATEST_CHOSEN = Latest(), Latest()


def run(
    q: Tensor,
    view: LatentView,
    row: PrefillRow,
    heads: HeadWeights,
    *,
    softmax_scale: float,
    form: Form,
) -> Tensor:
    nope = heads.key.shape[2]
    out = q.new_empty(*q.shape[:2], heads.value.shape[1])
    parts = (Slice(slice(0, row.count), row),)
    given = prepare(parts, view, heads, form)
    _attend(q[..., :nope], q[..., nope:], view, given, heads, out, softmax_scale)
    return out


def run_rows(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    parts: Sequence[Part],
    heads: HeadWeights,
    out: Tensor,
    *,
    softmax_scale: float,
) -> None:
    given = LATEST.prepared(parts, view, heads, None)
    _attend(q_nope, q_rope, view, given, heads, out, softmax_scale)


def run_chosen(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    parts: Sequence[Part],
    heads: HeadWeights,
    out: Tensor,
    positions: Tensor,
    *,
    softmax_scale: float,
) -> None:
    given = LATEST_CHOSEN.prepared(parts, view, heads, "chosen")
    assert given.cut is not None
    bits = _bits(unit_stride(positions), given, len(q_nope))
    _expanded(q_nope, q_rope, view, given.cut, heads, out, softmax_scale, bits)


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


def prepare(
    parts: Sequence[Part], view: LatentView, heads: HeadWeights, way: Way | None
) -> Prepared:
    """`way`: of all rows; without, each takes the cheaper form."""
    few: list[Part] = []
    many: list[Part] = []
    for part in parts:
        short = part.row.count <= FEW if way is None else way == "absorbed"
        (few if short else many).append(part)
    rows = _decode_rows(few, view, len(heads.key)) if few else None
    plan, device = launch(heads, view.layout.rope), view.rows.device
    made = Prepared(few, rows, lists(many, plan, device) if many else None)
    if way != "chosen":
        return made
    longest = max(part.row.start + part.row.count for part in parts)
    words = (longest + plan.keys) // BITS.value + 2  # a tile may begin at the last position
    return replace(made, picks=aligned([picks(parts)], device)[0].view(-1, 4), words=words)


def _decode_rows(parts: Sequence[Part], view: LatentView, heads: int) -> decode.Prepared:
    most = max(len(part.row.block_ids) for part in parts)
    lengths: list[int] = []
    blocks: list[int] = []
    for part in parts:
        row = part.row
        lengths += range(row.start + 1, row.start + row.count + 1)
        blocks += [*row.block_ids, *[0] * (most - len(row.block_ids))] * row.count
    sent_lengths, sent_blocks = aligned([lengths, blocks], view.rows.device)
    table = DecodeTable(sent_lengths, sent_blocks.view(len(lengths), most))
    return decode.prepare(table, view, TILING, heads)


def _attend(
    q_nope: Tensor,
    q_rope: Tensor,
    view: LatentView,
    given: Prepared,
    heads: HeadWeights,
    out: Tensor,
    softmax_scale: float,
) -> None:
    if given.decode is not None:
        slices = [part.tokens for part in given.few]
        q = _absorbed(q_nope, q_rope, slices, heads)
        u, _ = decode.run(q, view, given.decode, softmax_scale=softmax_scale)
        made = torch.bmm(u.transpose(0, 1), heads.value.mT).transpose(0, 1)
        sizes = [part.row.count for part in given.few]
        for at, rows in zip(slices, torch.split(made, sizes), strict=True):
            out[at] = rows
    if given.cut is not None:
        _expanded(q_nope, q_rope, view, given.cut, heads, out, softmax_scale)


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
    bits: Tensor | None = None,
) -> None:
    q_nope, q_rope = unit_stride(q_nope), unit_stride(q_rope)
    if cut.plan.paired and not can_copy(q_nope, q_rope):
        q_nope, q_rope = q_nope.contiguous(), q_rope.contiguous()
    count, _, nope = heads.key.shape
    value, rope, plan = heads.value.shape[1], view.layout.rope, cut.plan
    kept = cut.state.stop - cut.state.start
    state = q_nope.new_empty(kept, count, value, dtype=torch.float32)
    state_lse = q_nope.new_empty(kept, count, dtype=torch.float32)
    words = 0 if bits is None else bits.shape[1]
    assert out.is_contiguous()
    for run in cut.runs:
        latent, ropes = _gathered(view, cut, run)
        wide = latent.expand(count, -1, -1)
        keys, values = torch.bmm(wide, heads.key), torch.bmm(wide, heads.value.mT)
        told = (
            out, state, state_lse, softmax_scale * math.log2(math.e), len(run.tiles), count,
            run.total, cut.state.start, words, q_nope.stride(0), q_nope.stride(1),
            q_rope.stride(0), q_rope.stride(1), nope, rope, value,
        )  # fmt: skip
        programs = (len(run.tiles) * count,)
        if plan.paired:
            from trueline.ops.mla_prefill import hopper  # what it imports is not everywhere

            hopper.attend_paired[programs](
                q_nope, q_rope, keys, ropes, values, run.tiles, run.tiles if bits is None else bits,
                *told, HEADS=plan.heads, CHOSEN=bits is not None,
            )  # fmt: skip
            continue
        attend[programs](
            q_nope, q_rope, keys, ropes, values, run.tiles, bits, *told,
            P=max(power_of_two(nope), LEAST_DIM), R=max(power_of_two(rope), LEAST_DIM),
            V=max(power_of_two(value), LEAST_DIM), Q=plan.queries, N=plan.keys, HEADS=plan.heads,
            STAGES=plan.stages, num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip


def _gathered(view: LatentView, cut: Cut, run: Lists) -> tuple[Tensor, Tensor]:
    """The cached rows of a run's positions side by side: latent and rotated parts."""
    layout = view.layout
    latent = view.rows.new_empty(run.total, layout.latent)
    ropes = view.rows.new_empty(run.total, layout.rope)
    gather[(len(run.places),)](
        view.rows, cut.blocks, run.places, latent, ropes,
        LATENT=layout.latent, ROPE=layout.rope, L=power_of_two(layout.latent),
        R=power_of_two(layout.rope), COUNT=GATHERED, BLOCK=layout.block_size,
    )  # fmt: skip
    return latent, ropes
