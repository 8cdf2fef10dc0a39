"""Decode updates states in place; prefill works in tiles, all tiles of a span in one batched GEMM.

With a tail both work on whole tiles at absolute positions, and a decode row is computed at its own
place among the rows that prefill computes together: every GEMM has the same shape and the same
row at the same place. What was seen of the bits of float32 GEMMs here (torch.bmm through MKL, 1
and 2 threads): the number of matrix pairs and the other rows of the left matrix never mattered.
With odd widths, where a matrix begins in memory mattered, and so did a row's place; a left matrix
of one row is another routine. With widths that are multiples of 16 none of it did, but other
machines need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trueline.cache.state import StateView
from trueline.ops import invariant_math as bits
from trueline.ops.lightning import IMPLEMENTATIONS, PrefillParts, StateRow, StateTable

capabilities = IMPLEMENTATIONS["cpu"]

# Tokens in a tile where nothing depends on it.
TILE = 64
# Rows of a batch-invariant GEMM: as few as decode can do with, placed where prefill has them.
ROWS = 8
# Numbers in 64 bytes: matrices that wide all begin alike.
WIDTH = 16
# A batch of one GEMM may take another code path.
FEWEST = 2
# Numbers in the states of the tiles of one span: bounds the memory of a long prefill.
SPAN = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSlots:
    at: slice | Tensor  # the rows' slots; a slice where they follow each other
    slots: Tensor  # [n]
    starts: Tensor  # [n] tokens before this one
    moved: tuple[Tensor, Tensor] | None  # sources and slots of rows where they differ
    fresh: Tensor | None  # slots of rows that start from zeros
    snapshots: tuple[Tensor, Tensor] | None  # slots and where their contents go too


@dataclass(frozen=True, slots=True)
class StateTiles:
    """A span of tokens; the last tile is filled up with zeros."""

    keys: Tensor  # [tiles, heads, tile, dk]
    values: Tensor  # [tiles, heads, tile, dv]
    starts: Tensor  # [whole tiles + 1, heads, dk, dv] the state before each, and after the last


# -- decode ----------------------------------------------------------------------------


def prepare(rows: list[StateRow] | StateTable) -> DecodeSlots:
    assert not isinstance(rows, StateTable), "tables are for GPUs"
    slots = [row.slot for row in rows]
    follow = slots == list(range(slots[0], slots[0] + len(slots)))
    index = torch.tensor(slots)
    fresh = [row.slot for row in rows if row.source is None]
    return DecodeSlots(
        at=slice(slots[0], slots[0] + len(slots)) if follow else index,
        slots=index,
        starts=torch.tensor([row.start for row in rows]),
        moved=_columns(
            [(r.source, r.slot) for r in rows if r.source is not None and r.source != r.slot]
        ),
        fresh=torch.tensor(fresh) if fresh else None,
        snapshots=_columns([(row.slot, slot) for row in rows for _, slot in row.writes(1)[1:]]),
    )


def _columns(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
    if not pairs:
        return None
    first, second = torch.tensor(pairs).T
    return first, second


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: DecodeSlots,
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    _bring(view, prepared)
    advance = _advance_tile if view.tail else _advance_state
    out = advance(q.float(), k.float(), v.float(), view, prepared, slopes)
    if prepared.snapshots is not None:
        view.copy(*prepared.snapshots)
    return out.mul_(scale).to(q.dtype)


def _bring(view: StateView, rows: DecodeSlots) -> None:
    """Make every row's slot hold what the row starts from."""
    if rows.moved is not None:
        view.copy(*rows.moved)
    if rows.fresh is not None:
        view.clear(rows.fresh)


def _advance_state(
    q: Tensor, k: Tensor, v: Tensor, view: StateView, rows: DecodeSlots, slopes: Tensor
) -> Tensor:
    held = view.state[rows.at]
    state = held.float()
    keep, loss = _decay(_powers(slopes, 1)[:, 1])
    if keep is not None:
        state.mul_(keep)
    state.addcmul_(state, loss)
    state.addcmul_(k[..., None], v[..., None, :])
    if state is not held or not isinstance(rows.at, slice):
        view.state[rows.at] = state.to(held.dtype)
    return _product(q[..., None, :], state).squeeze(-2)


def _advance_tile(
    q: Tensor, k: Tensor, v: Tensor, view: StateView, rows: DecodeSlots, slopes: Tensor
) -> Tensor:
    powers = _powers(slopes, view.tail)
    offsets = rows.starts % view.tail
    each, heads = rows.slots[:, None], torch.arange(q.shape[1])
    view.keys[each, heads, offsets[:, None]] = k
    view.values[each, heads, offsets[:, None]] = v
    state, keys, values = _gather(view, rows.slots)
    places = torch.arange(len(q)), slice(None), offsets % ROWS
    block = q.new_zeros(*q.shape[:2], ROWS, keys.shape[-1])
    block[(*places, slice(q.shape[-1]))] = q
    weights = powers[:, _lags(view.tail)[offsets]].float().transpose(0, 1)[:, :, None]
    carry = powers[:, offsets + 1].float().T[..., None, None]
    out = _attend(block, state, keys, values, weights, carry)
    _close_tiles(view, rows.slots[offsets == view.tail - 1], powers)
    return out[places][..., : v.shape[-1]]


def _close_tiles(view: StateView, slots: Tensor, powers: Tensor) -> None:
    """Slots whose tile is full take it into their state, and begin the next."""
    if not len(slots):
        return
    state, keys, values = _gather(view, slots)
    state = _fold(state, _sums(keys, values, powers), powers[:, view.tail])
    dk, dv = view.state.shape[2:]
    view.clear(slots)
    view.state[slots] = state[..., :dk, :dv].to(view.state.dtype)


def _gather(view: StateView, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    state, keys, values = (part[slots].float() for part in view.parts)
    return _wide(state, rows=True), _wide(keys), _wide(values)


# -- prefill ---------------------------------------------------------------------------


def prepare_prefill(parts: PrefillParts) -> PrefillParts:
    return parts


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: PrefillParts,
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for at, row in prepared:
        out[at] = _prefill_row(q[at], k[at], v[at], view, row, slopes, scale)
    return out


def _prefill_row(
    q: Tensor, k: Tensor, v: Tensor, view: StateView, row: StateRow, slopes: Tensor, scale: float
) -> Tensor:
    tile = view.tail or min(TILE, len(q))
    powers = _powers(slopes, tile)
    state, open_keys, open_values = _read(view, row)
    before = len(open_keys)
    queries = torch.cat((torch.zeros_like(open_keys), q.float()))
    keys, values = torch.cat((open_keys, k.float())), torch.cat((open_values, v.float()))
    length = tile * max(1, SPAN // state.numel())
    out = []
    for first in range(0, len(keys), length):
        span = slice(first, first + length)
        tiles = _tiles(keys[span], values[span], state, powers, view)
        out.append(_outputs(queries[span], tiles, powers, ROWS if view.tail else tile))
        for position, slot in row.writes(len(q)):
            count = position - row.start + before - first
            if 0 < count <= length:
                _write(view, slot, tiles, count, powers)
        state = tiles.starts[-1]
    return torch.cat(out)[before:, :, : v.shape[-1]].mul_(scale).to(q.dtype)


def _read(view: StateView, row: StateRow) -> tuple[Tensor, Tensor, Tensor]:
    """The state [heads, dk, dv] and the open tile's keys and values [tokens, heads, d]."""
    state, keys, values = (part[row.source or 0].float() for part in view.parts)
    if row.source is None:
        state = torch.zeros_like(state)
    before = row.start % view.tail if view.tail else 0
    return (
        _wide(state, rows=True),
        keys[:, :before].transpose(0, 1),
        values[:, :before].transpose(0, 1),
    )


def _tiles(
    keys: Tensor, values: Tensor, state: Tensor, powers: Tensor, view: StateView
) -> StateTiles:
    tile = powers.shape[1] - 2
    k, v = _cut(keys, tile), _cut(values, tile)
    whole = len(keys) // tile
    starts = state.new_empty(whole + 1, *state.shape)
    starts[0] = state
    for i, total in enumerate(_sums(k[:whole], v[:whole], powers)):
        after = _fold(starts[i], total, powers[:, tile])
        starts[i + 1] = after.to(view.state.dtype) if view.tail else after
    return StateTiles(k, v, starts)


def _cut(x: Tensor, tile: int) -> Tensor:
    """[tokens, heads, d] -> [tiles, heads, tile, d], filled up with zeros."""
    tokens, heads, d = x.shape
    full = pad(x, (0, -d % WIDTH, 0, 0, 0, -tokens % tile))
    return full.reshape(-1, tile, heads, full.shape[-1]).transpose(1, 2).contiguous()


def _outputs(queries: Tensor, tiles: StateTiles, powers: Tensor, rows: int) -> Tensor:
    """[tokens, heads, dk] -> [tokens, heads, dv], `rows` of every tile at a time."""
    num, _, tile, _ = tiles.keys.shape
    q, state = _cut(queries, tile), tiles.starts[:num]
    weights, carry = powers[:, _lags(tile)].float(), powers[:, 1 : tile + 1, None].float()
    out = [
        _attend(
            q[:, :, i : i + rows],
            state,
            tiles.keys,
            tiles.values,
            weights[:, i : i + rows],
            carry[:, i : i + rows],
        )
        for i in range(0, tile, rows)
    ]
    return torch.cat(out, dim=2).transpose(1, 2).flatten(0, 1)[: len(queries)]


def _write(view: StateView, slot: int, tiles: StateTiles, count: int, powers: Tensor) -> None:
    """What a row that ended after `count` tokens of the span would leave."""
    tile = tiles.keys.shape[2]
    last, left = (count - 1) // tile, count % tile
    state = tiles.starts[count // tile]
    keys, values = (x[last : last + 1, :, :left] for x in (tiles.keys, tiles.values))
    if left and not view.tail:
        state = _fold(state, _sums(keys, values, powers)[0], powers[:, left])
        keys, values = keys[:, :, :0], values[:, :, :0]
    dk, dv = view.state.shape[2:]
    view.write(slot, state[:, :dk, :dv], keys[0, ..., :dk], values[0, ..., :dv])


# -- both ------------------------------------------------------------------------------


def _powers(slopes: Tensor, most: int) -> Tensor:
    """λ^0 … λ^most, then a zero for tokens that come later: [heads, most + 2], in float64. Each
    from its own exponent: nothing overflows."""
    exponents = -slopes.double()[:, None] * torch.arange(most + 1)
    return pad(bits.exp(exponents), (0, 1))


def _decay(factor: Tensor) -> tuple[Tensor | None, Tensor]:
    """S times factor [heads], as T + loss · T with T = keep · S. A factor near 1 is not applied as
    such: rounded to float32 it would err to the same side at every token. None: T is S."""
    weak = factor > 0.5
    loss = torch.where(weak, factor - 1, 0.0).float()[:, None, None]
    if bool(weak.all()):
        return None, loss
    return torch.where(weak, 1.0, factor).float()[:, None, None], loss


def _lags(tile: int) -> Tensor:
    """[query, key] -> index into the powers."""
    at = torch.arange(tile)
    lag = at[:, None] - at
    return lag.masked_fill(lag < 0, tile + 1)


def _attend(
    q: Tensor, state: Tensor, keys: Tensor, values: Tensor, weights: Tensor, carry: Tensor
) -> Tensor:
    """o_r = λ^(r+1) q_r S + Σ_{j ≤ r} λ^(r-j) (q_r · k_j) v_j for rows r of a tile: the state was
    that before the tile, so its first token sees it decayed once."""
    scores = _product(q, keys.mT).mul_(weights)
    return _product(q, state).mul_(carry).add_(_product(scores, values))


def _sums(keys: Tensor, values: Tensor, powers: Tensor) -> Tensor:
    """What the tokens of a tile add to the state after its last: Σ_j λ^(n-1-j) k_jᵀ v_j."""
    weights = powers[:, : keys.shape[2]].flip(-1).float()
    return _product((keys * weights[..., None]).mT, values)


def _fold(state: Tensor, total: Tensor, factor: Tensor) -> Tensor:
    """factor · S + total, in plain products and sums, which round alike everywhere; fused ones
    need not."""
    keep, loss = _decay(factor)
    kept = state if keep is None else state * keep
    return (kept * loss).add_(kept).add_(total)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[n, heads, …] matrices, pair by pair."""
    n, heads = a.shape[:2]
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    if len(a) == 1:
        a, b = a.expand(FEWEST, -1, -1), b.expand(FEWEST, -1, -1)
    out = torch.bmm(a, b)[: n * heads]
    return out.view(n, heads, *out.shape[1:])


def _wide(x: Tensor, rows: bool = False) -> Tensor:
    """Zeros up to a multiple of WIDTH, of the rows too if asked."""
    right, below = -x.shape[-1] % WIDTH, -x.shape[-2] % WIDTH if rows else 0
    return pad(x, (0, right, 0, below)) if right or below else x
