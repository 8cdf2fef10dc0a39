"""Prefill rows that see only what they chose, against the reference of attention over lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.ops.capabilities import Opaque
from trueline.ops.mla_prefill import HeadWeights, MaskedPrefill, PrefillRow
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.verify.bounds import Attended
from trueline.verify.ops import attended
from trueline.verify.ops.data import SMALL, Dims, paged, randn, require, shuffled, within

HEADS, WIDTH = 3, 70
RUNS = ((40, 17), (190, 35), (0, 20), (127, 18))
"""Positions before, and new ones."""
SPARE = 3
"""Tokens, and rows of choices, before each run and after the last that are not its."""


@dataclass(frozen=True)
class ChosenRow:
    tokens: slice
    row: PrefillRow
    chosen: int


def choices(start: int, count: int, kind: int) -> list[list[int]]:
    """Lists of a run's tokens, ended by -1 and then by what nobody may look at. Kinds differ in
    what they leave out: the needle in the middle, all but a few near the beginning or the end (so
    that whole tiles are empty, and a token's neighbours choose nothing there)."""
    made = []
    needle = (start + count) // 2
    for i in range(count):
        length = start + i + 1
        order = [p - 1 for p in shuffled(length, 100 * kind + i)]
        if kind % 3 == 0:
            order = [p for p in order if p != needle]
        elif kind % 3 == 1:
            near = 7 if i % 2 else length - 9
            order = [p for p in order if near - 7 <= p < near + 7]
        taken = order[: WIDTH - i % 3] if i % 11 else [0, length - 1][: i % 2]
        made.append([*taken, -1, *[5] * WIDTH][:WIDTH])
    return made


def step(dtype: torch.dtype, dims: Dims) -> tuple[LatentView, list[ChosenRow], list[Tensor], int]:
    """The cache, the runs, what two layers chose, and how many tokens there are."""
    view, held = paged([start + count for start, count in RUNS], 4, dtype=dtype, dims=dims)
    parts: list[ChosenRow] = []
    between = [[1 << 40] * WIDTH] * SPARE
    layers = [list(between), list(between)]
    token = 2 * SPARE
    for kind, ((start, count), ids) in enumerate(zip(RUNS, held.block_ids, strict=True)):
        row = PrefillRow(start, count, ids)
        parts.append(ChosenRow(slice(token, token + count), row, len(layers[0])))
        for layer, rows in enumerate(layers):
            rows += [*choices(start, count, kind + layer), *between]
        token += count + 1
    wide = torch.tensor([[[0, *row, 0] for row in rows] for rows in layers])  # strided
    return view, parts, list(wide[..., 1:-1]), token


def exact(
    q: Tensor, view: LatentView, part: ChosenRow, heads: HeadWeights, positions: Tensor, dims: Dims
) -> Attended:
    row = part.row
    rows = SparseRows((Run(row.block_ids, row.start + 1, row.count),))
    return attended.chosen(q, view, row, heads, rows, positions, dims.scale)


def chosen(
    op: MaskedPrefill[Opaque], dtype: torch.dtype = torch.float32, dims: Dims = SMALL
) -> None:
    """Two layers of a step that chose otherwise; then a position that its token does not see."""
    view, parts, layers, tokens = step(dtype, dims)
    heads, unscaled = dims.weights(HEADS, dtype), dims
    q = randn(tokens, HEADS, dims.nope + dims.rope + 2, seed=7).to(dtype)[..., 1:-1]

    prepared = op.prepare_chosen(parts, view, dims.heads(HEADS))

    def run(positions: Tensor, out: Tensor) -> Tensor:
        given = q[..., : dims.nope], q[..., dims.nope :], view, prepared, heads, out, positions
        op.run_chosen(*given, softmax_scale=dims.scale)
        return out

    for layer, positions in enumerate(layers):
        dims = unscaled.scaled(layer)
        out = run(positions, q.new_full((tokens, HEADS, dims.value), torch.nan))
        free = torch.ones(tokens, dtype=torch.bool)
        for part in parts:
            at, row = part.tokens, part.row
            listed = positions[part.chosen : part.chosen + row.count]
            wanted = exact(q[at], view, part, heads, listed, dims)
            what = f"mla_prefill, chosen, layer {layer}, {row.start} + {row.count}"
            within(what, out[at], wanted.out, wanted.out_bound[..., None])
            empty = listed[:, 0] < 0
            require(bool((out[at][empty] == 0).all()), f"{what}: nothing chosen is not zero")
            free[at] = False
        require(bool(out[free].isnan().all()), "mla_prefill, chosen: another token was written")
    part, positions = parts[1], layers[0].clone()
    positions[part.chosen + 4, 1] = part.row.start + 5
    wrong = run(positions, q.new_zeros(tokens, HEADS, dims.value)).isnan().any(-1).all(-1)
    named = torch.arange(tokens) == part.tokens.start + 4
    require(torch.equal(wrong, named), "mla_prefill, chosen: a position that its token cannot see")
