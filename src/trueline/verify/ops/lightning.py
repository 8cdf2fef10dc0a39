"""Linear attention against the recurrence in float64: any cuts, any slots, snapshots, decays from
almost none to overwhelming, and bits in the fixed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from trueline.cache.state import StateStore, StateView
from trueline.ops.capabilities import Opaque
from trueline.ops.lightning import LightningAttention, StateRow
from trueline.ops.registry import implementation
from trueline.verify.bounds import chain_bound, dot_bound, narrow, scattered, stored, unit
from trueline.verify.ops.data import randn, require, within

LightningOp = LightningAttention[Opaque, Opaque]


def definition() -> LightningOp:
    """The definition, in float64."""
    return implementation("lightning", "reference")


SCALE = 0.37
LENGTH = 300
HEADS, DK, DV = 3, 37, 41
ROOM = (1, 2)
"""Channels of a wider tensor before and after each head's."""
FREE, FIXED = 0, (64, 8)
"""Positions in the tail of a slot."""


@dataclass(frozen=True)
class Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    scale: float = SCALE

    def exactly(self) -> Tokens:
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        return replace(self, q=q, k=k, v=v)

    def squares(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.double().square(), self.k.double().square(), self.v.double().square()


def tokens(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> Tokens:
    """Strided, with a needle far back."""
    return _tokens(length, dtype, torch.get_default_device())


@cache
def _tokens(length: int, dtype: torch.dtype, device: torch.device) -> Tokens:
    before, after = ROOM
    wide = [randn(HEADS, length, d + before + after, seed=i) for i, d in enumerate((DK, DK, DV))]
    q, k, v = (x.to(dtype).transpose(0, 1)[..., before:-after] for x in wide)
    k[7] *= 50
    return Tokens(q, k, v, torch.tensor([1e-5, 0.02, 3.0]))


def slots(
    tail: int,
    count: int,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int, int] | None = None,
) -> StateView:
    """A layer of slots full of NaN. `dims`: heads, channels of a key and of a value."""
    heads, dk, dv = dims or (HEADS, DK, DV)
    store = StateStore(1, count, heads=heads, dk=dk, dv=dv, dtype=dtype, tail=tail)
    store.poison(range(count))
    return store.views[0]


def run(
    op: LightningOp, view: StateView, t: Tokens, start: int, stop: int, chunk: int, slot: int = 1
) -> Tensor:
    """Tokens start..stop on one slot, `chunk` at a time; 0 means by decode."""
    out = []
    for at in range(start, stop, chunk or 1):
        row = StateRow(at, slot if at else None, slot)
        part = slice(at, min(at + (chunk or 1), stop))
        if chunk:
            out.append(prefill(op, view, t, part, row))
        else:
            q, k, v = t.q[part], t.k[part], t.v[part]
            given = op.prepare([row])
            out.append(op.decode(q, k, v, view, given, slopes=t.slopes, scale=t.scale))
    return torch.cat(out)


def prefill(op: LightningOp, view: StateView, t: Tokens, part: slice, row: StateRow) -> Tensor:
    """A row alone."""
    q, k, v = t.q[part], t.k[part], t.v[part]
    prepared = op.prepare_prefill([(slice(0, len(q)), row)])
    out: Tensor = op.prefill(q, k, v, view, prepared, slopes=t.slopes, scale=t.scale)
    return out


def exact(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Outputs, and how far from them each may be."""
    return _exact(length, dtype, torch.get_default_device())


@cache
def _exact(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    t = tokens(length, dtype).exactly()
    view = slots(FREE, 2, torch.float64)
    out = run(definition(), view, t, 0, length, length)
    return out, out_bound(t, out, dtype)


def out_bound(t: Tokens, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Of sums over channels and positions. A 16-bit op rounds what queries and keys make."""
    q, k, v = t.squares()
    places = torch.arange(len(out))
    ages = (places[:, None] - places).double()
    kept = torch.exp(-2 * t.slopes.double()[:, None, None] * ages.clamp_min(0)) * (ages >= 0)
    size = t.scale * torch.einsum("thd,shd,hts,shv->thv", q, k, kept, v).sqrt()
    off = dot_bound(len(out) + q.shape[-1], size, dtype) + scattered(size, dtype)
    return off + stored(out, dtype)


def state_bound(t: Tokens, stop: int, tail: int, dtype: torch.dtype) -> Tensor:
    """Of a state, which is float32 whatever the inputs are in: [heads, dk, dv], after all tokens
    before `stop` but those of an open tile. Values after their decay are cut in two parts of a
    16-bit dtype."""
    count = stop - stop % tail if tail else stop
    _, k, v = t.squares()
    ages = torch.arange(count - 1, -1, -1).double()
    kept = torch.exp(-2 * t.slopes.double()[:, None] * ages)
    size = torch.einsum("hs,shk,shv->hkv", kept, k[:count], v[:count]).sqrt()
    return dot_bound(count, size, dtype) + (unit(dtype) ** 2 if narrow(dtype) else 0.0) * size


def _cuts(
    op: LightningOp, tail: int, dtype: torch.dtype = torch.float32, length: int = LENGTH
) -> None:
    t, (wanted, off) = tokens(length, dtype), exact(length, dtype)
    before = [x.clone() for x in (t.q, t.k, t.v)]
    for chunk in (0, 1, 7, 63, 64, 65, length):
        ours = run(op, slots(tail, 2), t, 0, length, chunk)
        within(f"lightning, tail {tail}, {_how(chunk)}", ours, wanted, off)
    same = all(torch.equal(x, y) for x, y in zip((t.q, t.k, t.v), before, strict=True))
    require(same, "lightning writes its input")


def _how(chunk: int) -> str:
    return f"{chunk} tokens at a time" if chunk else "by decode"


def any_cuts(op: LightningOp, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> None:
    _cuts(op, FREE, dtype, length)


def any_decay(
    op: LightningOp, dtype: torch.dtype = torch.float32, length: int = 130, steps: int = 2000
) -> None:
    """So strong that its inverse overflows; and so weak that a rounded factor would drift."""
    t = tokens(length, dtype)
    t = Tokens(t.q, t.k, t.v, torch.tensor([0.0, 20.0, 1000.0]), 2 * SCALE)
    wanted = run(definition(), slots(FREE, 2, torch.float64), t.exactly(), 0, length, length)
    off = out_bound(t, wanted, dtype)
    for chunk in (0, 63, length):
        ours = run(op, slots(FREE, 2), t, 0, length, chunk)
        within("lightning, strong decay", ours, wanted, off)
    slopes = torch.tensor([1e-5, 4e-5, 1e-4])
    zeros = torch.zeros(steps, HEADS, DK, dtype=dtype)
    zeros[0] = 1
    t = Tokens(zeros, zeros, torch.ones(steps, HEADS, DV, dtype=dtype), slopes)
    left = torch.exp(-slopes.double() * (steps - 1))[:, None].expand(-1, DK * DV)
    for chunk in (0, 1):
        view = slots(FREE, 2)
        run(op, view, t, 0, steps, chunk)
        drift = chain_bound(steps) * left
        within("lightning, weak decay", view.state[1].flatten(1), left, drift)


def _slots(op: LightningOp, tail: int, dtype: torch.dtype = torch.float32) -> None:
    """Rows of prefill, with and without a source, own or another's, and a snapshot at the end."""
    t, (wanted, off) = tokens(LENGTH, dtype), exact(LENGTH, dtype)
    for start, count, slot in ((0, 1, 4), (0, 70, 2), (5, 1, 4), (63, 1, 2), (40, 100, 4)):
        what = f"lightning, tail {tail}, {start} + {count} into slot {slot}"
        view, stop = slots(tail, 6), start + count
        if start:
            run(op, view, t, 0, start, start, slot=2)
        before = [part.clone() for part in view.parts]
        row = StateRow(start, 2 if start else None, slot, ((stop, 3),))
        part = slice(start, stop)
        ours = prefill(op, view, t, part, row)
        within(what, ours, wanted[part], off[part])
        for now, old in zip(view.parts, before, strict=True):
            require(torch.equal(now[slot], now[3]), f"{what}: the snapshot differs")
            rest = [i for i in range(6) if i not in (slot, 3)]
            kept = torch.equal(now[rest].nan_to_num(9.0), old[rest].nan_to_num(9.0))
            require(kept, f"{what}: another slot was written")


def _snapshots(op: LightningOp, tail: int, dtype: torch.dtype = torch.float32) -> None:
    """What a run that stopped there leaves."""
    t, places = tokens(LENGTH, dtype), (6, 7, 63, 64, 65, 128, 130, 205)
    view = slots(tail, 12)
    run(op, view, t, 0, 5, 5)
    row = StateRow(5, 1, 2, tuple((p, 3 + i) for i, p in enumerate(places)))
    part = slice(5, 205)
    prefill(op, view, t, part, row)
    for i, place in enumerate(places):
        stopped = slots(tail, 2)
        run(definition(), stopped, t, 0, place, place)
        off = state_bound(t, place, tail, dtype)
        _same_slot(f"lightning, tail {tail}, snapshot at {place}", view, 3 + i, stopped, off)


def _mixed(op: LightningOp, tail: int, dtype: torch.dtype = torch.float32) -> None:
    """Decode of shuffled slots: own and other sources, one of them read by three rows, one of
    which writes it; a row from zeros; snapshots."""
    t, (wanted, off) = tokens(LENGTH, dtype), exact(LENGTH, dtype)
    starts = {5: 63, 9: 64, 2: 7, 7: 0, 3: 100, 8: 100, 4: 100}
    sources = {5: 5, 9: 1, 2: 2, 7: None, 3: 4, 8: 4, 4: 4}
    taken = {9: 10, 4: 11, 7: 12}
    view, what = slots(tail, 15), f"lightning, tail {tail}, mixed decode rows"
    for slot, source in sources.items():
        if source:
            run(op, view, t, 0, starts[slot], 50, slot=source)
    rows = [
        StateRow(start, sources[s], s, ((start + 1, taken[s]),) if s in taken else ())
        for s, start in starts.items()
    ]
    at = list(starts.values())
    q, k, v = t.q[at], t.k[at], t.v[at]
    out = op.decode(q, k, v, view, op.prepare(rows), slopes=t.slopes, scale=SCALE)
    within(what, out, wanted[at], off[at])
    for slot, start in starts.items():
        alone = slots(tail, 2)
        run(definition(), alone, t, 0, start + 1, 50)
        left = state_bound(t, start + 1, tail, dtype)
        for place in {slot, taken.get(slot, slot)}:
            _same_slot(f"{what}: slot {place}", view, place, alone, left)
    untouched = all(bool(part[[6, 13, 14]].isnan().all()) for part in view.parts)
    require(untouched, f"{what}: another slot was written")


def _together(op: LightningOp, dtype: torch.dtype) -> None:
    """Rows of a step at once: long and short ones, two from one snapshot, with other tokens
    between them."""
    t, (wanted, off) = tokens(LENGTH, dtype), exact(LENGTH, dtype)
    view, what = slots(FREE, 9), "lightning, rows of prefill together"
    run(op, view, t, 0, 40, 40, slot=8)
    rows = (StateRow(40, 8, 2), StateRow(0, None, 3, ((70, 4), (64, 5))), StateRow(40, 8, 6))
    counts, places, parts = (20, 170, 66), [0, 1], []
    for row, count in zip(rows, counts, strict=True):
        parts.append((slice(len(places), len(places) + count), row))
        places += [*range(row.start, row.start + count), 0]
    q, k, v = t.q[places], t.k[places], t.v[places]
    prepared = op.prepare_prefill(parts)
    out = op.prefill(q, k, v, view, prepared, slopes=t.slopes, scale=SCALE)
    for part, row in parts:
        at = places[part]
        within(f"{what}: {row}", out[part], wanted[at], off[at])
    for slot, place in ((2, 60), (3, 170), (4, 70), (5, 64), (6, 106)):
        alone = slots(FREE, 2)
        run(definition(), alone, t, 0, place, place)
        left = state_bound(t, place, FREE, dtype)
        _same_slot(f"{what}: slot {slot}", view, slot, alone, left)
    require(bool(view.state[[0, 1, 7]].isnan().all()), f"{what}: another slot was written")


def _same_slot(what: str, view: StateView, slot: int, wanted: StateView, off: Tensor) -> None:
    """Against slot 1 of the reference's. Keys and values of an open tile are never rounded."""
    ours, exactly = view.state[slot].flatten(1), wanted.state[1].flatten(1)
    within(f"{what}: state", ours, exactly, off.flatten(1))
    require(torch.equal(view.keys[slot], wanted.keys[1]), f"{what}: keys of the open tile")
    require(torch.equal(view.values[slot], wanted.values[1]), f"{what}: values of the open tile")


def free_slots(op: LightningOp, dtype: torch.dtype = torch.float32) -> None:
    for check in (_slots, _snapshots, _mixed):
        check(op, FREE, dtype)
    _together(op, dtype)


def fixed_form(op: LightningOp) -> None:
    for tail in FIXED:
        for check in (_cuts, _slots, _snapshots, _mixed):
            check(op, tail)


def fixed_bits(op: LightningOp) -> None:
    """The same bits, in outputs and slots, whatever the cuts, and whatever else is in the step."""
    t = tokens()
    for tail in FIXED:
        whole = slots(tail, 2)
        wanted = run(op, whole, t, 0, LENGTH, LENGTH)
        for chunk in (0, 1, 7, 63, 65):
            view = slots(tail, 2)
            ours = run(op, view, t, 0, LENGTH, chunk)
            what = f"lightning, tail {tail}, {_how(chunk)}: bits differ"
            require(torch.equal(ours, wanted), what)
            for now, then in zip(view.parts, whole.parts, strict=True):
                require(torch.equal(now[1], then[1]), f"{what} in the slot")
        view, starts = slots(tail, 7), [1, 63, 64, 9, 200]
        for slot, start in enumerate(starts, 1):
            run(op, view, t, 0, start, 50, slot=slot)
        rows = [StateRow(start, slot, slot) for slot, start in enumerate(starts, 1)]
        ours = op.decode(t.q[starts], t.k[starts], t.v[starts], view, op.prepare(rows),
                         slopes=t.slopes, scale=SCALE)  # fmt: skip
        require(torch.equal(ours, wanted[starts]), f"lightning, tail {tail}: bits in a batch")


def at_dims(
    op: LightningOp, dtype: torch.dtype, slopes: Sequence[float], width: int, length: int = 200
) -> None:
    """Heads with these decays, of this many channels: as prefill, cut, and by decode."""
    dims = len(slopes), width, width
    wide = [randn(len(slopes), length, width + sum(ROOM), seed=i) for i in range(3)]
    q, k, v = (x.to(dtype).transpose(0, 1)[..., ROOM[0] : -ROOM[1]] for x in wide)
    k[7] *= 50
    t = Tokens(q, k, v, torch.tensor(slopes))
    state = slots(FREE, 2, torch.float64, dims)
    wanted = run(definition(), state, t.exactly(), 0, length, length)
    off = out_bound(t, wanted, dtype)
    for chunk in (length, 63, 0):
        stop = length if chunk else 40
        ours = run(op, slots(FREE, 2, dims=dims), t, 0, stop, chunk)
        within(f"lightning, {dims}, {_how(chunk)}", ours, wanted[:stop], off[:stop])
