"""Linear attention with one decay per head: every implementation against the recurrence in float64,
on data that hides nothing; and slots, which nobody but their row may touch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from spread import diagonal
from trueline.cache.state import SlotShape, StateStore, StateView
from trueline.ops.lightning import StateRow, cpu, reference
from trueline.ops.registry import OPS, capabilities, implementation
from trueline.verify import bounds
from trueline.verify.ops import lightning as checks
from trueline.verify.ops import randn

SCALE = checks.SCALE
LENGTH = 300
# Heads, and their unequal prime dims.
SHAPES = {1: (13, 11), 3: (37, 41), 6: (11, 13), 16: (5, 7)}
CHUNKS = (1, 2, 7, 63, 64, 65, LENGTH)
FORMS = {"free": 0, "fixed 64": 64, "fixed 8": 8}

NAMES = [name for name in OPS["lightning"] if "cpu" in capabilities("lightning", name).devices]

each_op = pytest.mark.parametrize("op", [implementation("lightning", n) for n in NAMES], ids=NAMES)
each_form = pytest.mark.parametrize("tail", FORMS.values(), ids=FORMS)
each_fixed = pytest.mark.parametrize("tail", [8, 64])


@dataclass(frozen=True)
class Data:
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor

    def __getitem__(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[part], self.k[part], self.v[part]

    @property
    def tokens(self) -> checks.Tokens:
        return checks.Tokens(self.q, self.k, self.v, self.slopes)

    def map(self, function: Any) -> Data:
        return Data(function(self.q), function(self.k), function(self.v), self.slopes)


def data(heads: int = 3, length: int = LENGTH, seed: int = 0) -> Data:
    """Strided, with a needle far back, and decays from almost none to strong."""
    dk, dv = SHAPES[heads]
    wide = [randn(heads, length, d + 3, seed=seed + i) for i, d in enumerate((dk, dk, dv))]
    q, k, v = (x.transpose(0, 1)[..., 1:-2] for x in wide)
    k[min(7, length - 1)] *= 50
    slopes = torch.logspace(-5, torch.tensor(3.0).log10().item(), heads)
    return Data(q, k, v, slopes)


def empty(d: Data, tail: int, num_slots: int = 4, dtype: torch.dtype = torch.float32) -> StateView:
    """A layer of slots full of NaN."""
    heads, dk, dv = d.k.shape[1], d.k.shape[2], d.v.shape[2]
    store = StateStore(1, num_slots, heads=heads, dk=dk, dv=dv, dtype=dtype, tail=tail)
    store.poison(range(num_slots))
    return store.views[0]


def run(op: Any, view: StateView, d: Data, start: int, stop: int, chunk: int = 0, *,
        slot: int = 1) -> Tensor:  # fmt: skip
    """Tokens start..stop on one slot, `chunk` at a time; 0 means by decode."""
    out, given = [], {"slopes": d.slopes, "scale": SCALE}
    for at in range(start, stop, chunk or 1):
        row = StateRow(at, slot if at else None, slot)
        tokens = d[slice(at, min(at + (chunk or 1), stop))]
        if chunk:
            out.append(prefill(op, *tokens, view, row, **given))
        else:
            out.append(op.decode(*tokens, view, op.prepare([row]), **given))
    return torch.cat(out)


def prefill(op: Any, q: Tensor, k: Tensor, v: Tensor, view: StateView, row: StateRow,
            **given: Any) -> Any:  # fmt: skip
    """A row alone."""
    return op.prefill(q, k, v, view, op.prepare_prefill([(slice(0, len(q)), row)]), **given)


@cache
def exact(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, how far from them each may be, and the last state."""
    d = data(heads).map(Tensor.double)
    view = empty(d, 0, dtype=torch.float64)
    out = run(reference, view, d, 0, LENGTH, LENGTH)
    return out, checks.out_bound(d.tokens, out, torch.float32), view.state[1]


def assert_close(ours: Tensor, wanted: Tensor, off: Tensor) -> None:
    checks.within("lightning", ours, wanted, off)


def assert_states_close(ours: Tensor, wanted: Tensor, d: Data, stop: int, tail: int = 0) -> None:
    """Head by head: [heads, dk, dv]."""
    off = checks.state_bound(d.tokens, stop, tail, torch.float32)
    checks.within("lightning, states", ours.flatten(1), wanted.flatten(1), off.flatten(1))


def slots_equal(view: StateView, a: int, other: StateView, b: int) -> bool:
    return all(torch.equal(x[a], y[b]) for x, y in zip(view.parts, other.parts, strict=True))


# -- numbers ---------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize(("tail", "heads"), diagonal(FORMS.values(), SHAPES))
def test_any_chunks_equal_the_recurrence(op: Any, tail: int, heads: int) -> None:
    d, (wanted, off, state) = data(heads), exact(heads)
    before = [x.clone() for x in (d.q, d.k, d.v)]
    # the reference is slow, and its chunks cannot differ much
    for chunk in (0, *CHUNKS) if op is not reference else (0, 7):
        view = empty(d, tail)
        assert_close(run(op, view, d, 0, LENGTH, chunk), wanted, off)
        if not tail:
            assert_states_close(view.state[1], state, d, LENGTH)
    assert all(torch.equal(x, y) for x, y in zip((d.q, d.k, d.v), before, strict=True))


@each_form
@pytest.mark.parametrize(("first", "second"), list(product(NAMES, repeat=2)))
@pytest.mark.parametrize("cut", [1, 8, 64, 70])
def test_one_goes_on_where_another_stopped(tail: int, first: str, second: str, cut: int) -> None:
    d, (wanted, off, _) = data(), exact(3)
    view = empty(d, tail)
    for name, start, stop in ((first, 0, cut), (second, cut, 140)):
        out = run(implementation("lightning", name), view, d, start, stop, stop - start)
        assert_close(out, wanted[start:stop], off[start:stop])


@each_op
@each_form
def test_decay_so_strong_that_its_inverse_overflows(op: Any, tail: int) -> None:
    d = data(6, 130)
    d = Data(*d[slice(None)], torch.tensor([0.0, 1.4, 5, 20, 88, 1000]))
    wanted = run(reference, empty(d, 0, dtype=torch.float64), d.map(Tensor.double), 0, 130, 130)
    off = checks.out_bound(d.tokens, wanted, torch.float32)
    for chunk in (0, 1, 63, 130):
        assert_close(run(op, empty(d, tail), d, 0, 130, chunk), wanted, off)


@each_op
@pytest.mark.parametrize(("slopes", "steps"), [((1e-5, 4e-5, 1e-4), 3000), ((0.7, 5.0, 9.0), 6)])
def test_decay_alone(op: Any, slopes: tuple[float, ...], steps: int) -> None:
    """One token, then zeros: only its decay is left. A weak one, exp(-slope) rounded to float32,
    would be off by up to 3e-8 every time; a strong one must not come from a difference to 1."""
    rates = torch.tensor(slopes)
    d = Data(randn(steps, 3, 4), torch.zeros(steps, 3, 4), randn(steps, 3, 5, seed=1), rates)
    d.k[0] = randn(3, 4, seed=2)
    first = d.k[0].double()[..., None] * d.v[0].double()[:, None]
    wanted = first * torch.exp(-rates.double() * (steps - 1))[:, None, None]
    for chunk in (0, 1):
        view = empty(d, 0)
        run(op, view, d, 0, steps, chunk)
        drift = bounds.chain_bound(steps) * wanted.abs()
        checks.within(
            "lightning, drift", view.state[1].flatten(1), wanted.flatten(1), drift.flatten(1)
        )


def test_long_rows_go_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    d, (wanted, off, _) = data(), exact(3)
    for tail, most in product((0, 64), (1, 2 * 3 * 48 * 48)):
        whole, view = empty(d, tail), empty(d, tail)
        row = StateRow(0, None, 1, ((130, 2), (128, 3)))
        given = {"slopes": d.slopes, "scale": SCALE}
        out = prefill(cpu, *d[slice(None)], whole, row, **given)
        monkeypatch.setattr(cpu, "SPAN", most)  # a tile, or two, at a time
        assert torch.equal(prefill(cpu, *d[slice(None)], view, row, **given), out)
        monkeypatch.undo()
        assert_close(out, wanted, off)
        assert all(slots_equal(view, slot, whole, slot) for slot in (1, 2, 3))


# -- slots -----------------------------------------------------------------------------


@each_op
@each_form
@pytest.mark.parametrize(
    ("start", "count"), [(0, 1), (0, 70), (5, 1), (63, 1), (40, 100), (64, 64)]
)
@pytest.mark.parametrize("own", [True, False])
def test_only_named_slots_are_read_and_written(
    op: Any, tail: int, start: int, count: int, own: bool
) -> None:
    d, (wanted, off, _) = data(), exact(3)
    view, stop = empty(d, tail, 6), start + count
    if start:
        run(op, view, d, 0, start, start, slot=2)
    source = 2 if start else None
    slot = 2 if own else 4
    row = StateRow(start, source, slot, ((stop, 3),))
    before = [part.clone() for part in view.parts]
    given = {"slopes": d.slopes, "scale": SCALE}
    out = prefill(op, *d[slice(start, stop)], view, row, **given)
    assert_close(out, wanted[start:stop], off[start:stop])
    assert slots_equal(view, slot, view, 3)
    for part, old in zip(view.parts, before, strict=True):
        assert part[[slot, 3]].isfinite().all()
        rest = [i for i in range(6) if i not in (slot, 3)]
        assert torch.equal(part[rest].nan_to_num(9.0), old[rest].nan_to_num(9.0))


@each_op
@each_form
def test_snapshots_are_what_a_run_that_stopped_there_leaves(op: Any, tail: int) -> None:
    d = data()
    places = (6, 7, 63, 64, 65, 128, 130, 205)
    view = empty(d, tail, 12)
    run(op, view, d, 0, 5, 5)
    row = StateRow(5, 1, 2, tuple((p, 3 + i) for i, p in enumerate(places)))
    prefill(op, *d[slice(5, 205)], view, row, slopes=d.slopes, scale=SCALE)
    for i, p in enumerate(places):
        stopped = empty(d, tail)
        run(op, stopped, d, 0, 5, 5)
        run(op, stopped, d, 5, p, p - 5)
        if tail:
            assert slots_equal(view, 3 + i, stopped, 1)
        else:
            assert_states_close(view.state[3 + i], stopped.state[1], d, p)
    assert slots_equal(view, 2, view, 3 + len(places) - 1)


@each_op
@each_form
def test_the_first_token_starts_from_zeros_on_any_slot(op: Any, tail: int) -> None:
    d = data()
    q, k, v = d[slice(0, 1)]
    wanted = SCALE * (q.double() * k).sum(-1, keepdim=True) * v
    off = checks.out_bound(checks.Tokens(q, k, v, d.slopes), wanted, torch.float32)
    for chunk in (0, 1):
        view = empty(d, tail)  # never used
        assert_close(run(op, view, d, 0, 1, chunk), wanted, off)
        run(op, view, d, 0, 100, 50)  # used by a request that is gone
        assert_close(run(op, view, d, 0, 1, chunk), wanted, off)
        assert all(part[1].isfinite().all() for part in view.parts)


@each_op
@each_form
def test_decode_of_mixed_rows(op: Any, tail: int) -> None:
    """Shuffled slots; own and other sources, one of them read by three rows, one of which writes
    it; a row from zeros; snapshots; padded rows on the null slot, which holds NaN."""
    d, (wanted, off, _) = data(), exact(3)
    starts = {5: 63, 9: 64, 2: 7, 7: 0, 3: 100, 8: 100, 4: 100, 0: 1}
    sources = {5: 5, 9: 1, 2: 2, 7: None, 3: 4, 8: 4, 4: 4, 0: 0}
    taken = {9: 10, 4: 11, 7: 12}
    view, given = empty(d, tail, 15), {"slopes": d.slopes, "scale": SCALE}
    for slot, source in sources.items():
        if source:
            run(op, view, d, 0, starts[slot], 50, slot=source)
    names = [5, 9, 0, 2, 7, 3, 8, 0, 4]
    rows = [
        StateRow(starts[s], sources[s], s, ((starts[s] + 1, taken[s]),) if s in taken else ())
        for s in names
    ]
    at = [starts[s] for s in names]
    out = op.decode(d.q[at], d.k[at], d.v[at], view, op.prepare(rows), **given)
    live = [i for i, s in enumerate(names) if s]
    assert_close(out[live], wanted[at][live], off[at][live])
    for slot in set(names) - {0}:
        fresh = empty(d, tail)
        run(op, fresh, d, 0, starts[slot] + 1, 50)
        if tail:
            assert slots_equal(view, slot, fresh, 1)
        else:
            assert_states_close(view.state[slot], fresh.state[1], d, starts[slot] + 1)
    assert all(slots_equal(view, slot, view, copy) for slot, copy in taken.items())
    assert all(part[[6, 13, 14]].isnan().all() for part in view.parts)


@each_op
@each_form
@pytest.mark.parametrize("slots", [(1, 2, 3), (1, 3, 2), (2, 3, 5)])
def test_decode_in_slots_that_follow_each_other_or_not(
    op: Any, tail: int, slots: tuple[int, ...]
) -> None:
    d, (wanted, off, _) = data(), exact(3)
    view, starts = empty(d, tail, 6), [5, 64, 63]
    for start, slot in zip(starts, slots, strict=True):
        run(op, view, d, 0, start, start, slot=slot)
    for at in (starts, [start + 1 for start in starts]):
        rows = [StateRow(start, slot, slot) for start, slot in zip(at, slots, strict=True)]
        given = {"slopes": d.slopes, "scale": SCALE}
        out = op.decode(d.q[at], d.k[at], d.v[at], view, op.prepare(rows), **given)
        assert_close(out, wanted[at], off[at])


def test_rows_that_cannot_be_are_refused() -> None:
    for start, source in ((0, 1), (1, None)):
        with pytest.raises(AssertionError, match="zeros exactly at the start"):
            StateRow(start, source, 1)
    for position in (5, 10):
        with pytest.raises(AssertionError, match=f"no snapshot at {position} up to 9"):
            StateRow(5, 1, 1, ((position, 2),)).writes(4)
    with pytest.raises(AssertionError, match="multiple of 8"):
        StateStore(1, 2, heads=3, dk=4, dv=5, dtype=torch.float32, tail=12)


# -- bits ------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize(
    ("tail", "heads", "dtype"), diagonal([8, 64], SHAPES, [torch.float32, torch.bfloat16])
)
def test_bits_do_not_depend_on_cuts(op: Any, tail: int, heads: int, dtype: torch.dtype) -> None:
    length = LENGTH if op is not reference else 70
    d, whole = data(heads), empty(data(heads), tail, dtype=dtype)
    wanted = run(op, whole, d, 0, length, length)
    for chunk in (0, *CHUNKS[:-1]) if op is not reference else (0, 7):
        view = empty(d, tail, dtype=dtype)
        assert torch.equal(run(op, view, d, 0, length, chunk), wanted)
        assert slots_equal(view, 1, whole, 1)
    for cut in (1, 64, 69):  # prefill, then decode
        view = empty(d, tail, dtype=dtype)
        out = torch.cat((run(op, view, d, 0, cut, cut), run(op, view, d, cut, length)))
        assert torch.equal(out, wanted)


@each_op
@each_fixed
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_bits_do_not_depend_on_company(op: Any, tail: int, heads: int) -> None:
    """64 rows, each at another place of its tile, and each of them alone or among some."""
    d, given = data(heads), {"scale": SCALE}
    starts = [1 + (37 * i) % 131 for i in range(64)]
    sources = (1 + torch.randperm(64, generator=torch.Generator().manual_seed(1))).tolist()
    full = empty(d, tail, 140)
    for start, source in zip(starts, sources, strict=True):
        run(cpu, full, d, 0, start, start, slot=source)

    def step(some: list[int], first: int = 0, last: int = heads) -> tuple[Tensor, StateView]:
        view = StateView(*(part[:, first:last].clone() for part in full.parts))
        rows = [StateRow(starts[i], sources[i], 70 + i) for i in some]
        at = [starts[i] for i in some]
        q, k, v = (x[at, first:last] for x in (d.q, d.k, d.v))
        slopes = d.slopes[first:last]
        return op.decode(q, k, v, view, op.prepare(rows), slopes=slopes, **given), view

    wanted, whole = step(list(range(64)))
    for some in ([0], [63], [5, 4], [9, 60, 33], list(range(20, 50))):
        out, view = step(some)
        assert torch.equal(out, wanted[some])
        assert all(slots_equal(view, 70 + i, whole, 70 + i) for i in some)
    for first in range(0, heads - 1, 2):  # nor on the other heads: a rank has some of them
        out, _ = step([3, 17, 40], first, first + 1)
        assert torch.equal(out, wanted[[3, 17, 40], first : first + 1])
    decoded = run(op, empty(d, tail), d, 0, 40, 40)
    for first in range(0, heads - 1, 2):
        few = slice(first, first + 1)
        part = Data(d.q[:, few], d.k[:, few], d.v[:, few], d.slopes[few])
        assert torch.equal(run(op, empty(part, tail), part, 0, 40, 40), decoded[:, few])


def test_bits_hold_where_a_row_s_place_in_a_product_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This machine may forgive what another does not."""
    real = torch.bmm

    def fussy(a: Tensor, b: Tensor) -> Tensor:
        rows = a.shape[1]
        return real(a, b) * (1 + (torch.arange(rows)[:, None] + rows + (len(a) == 1)) / 1024)

    monkeypatch.setattr(torch, "bmm", fussy)
    for heads, tail in product((1, 3), (8, 64)):
        d = data(heads, 140)
        wanted = run(cpu, empty(d, tail), d, 0, 140, 140)
        for chunk in (0, 1, 63):
            assert torch.equal(run(cpu, empty(d, tail), d, 0, 140, chunk), wanted)


# -- memory ----------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("tail", [0, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_state_is_stored_rounded(op: Any, tail: int, dtype: torch.dtype) -> None:
    d = data()
    narrow, plain = empty(d, tail, dtype=dtype), empty(d, tail)
    for chunk in (0, 64):
        run(op, plain, d, 0, 64, 64)
        run(op, narrow, d, 0, 64, 64)
        state = plain.state[1]
        assert torch.equal(narrow.state[1], state.to(dtype))
        assert not torch.equal(state, state.to(dtype).float())  # and float32 is not
        # what is read is what was stored: going on from the rounded numbers in float32
        plain.state[1] = narrow.state[1].float()
        out = run(op, narrow, d, 64, 65, chunk)
        assert torch.equal(out, run(op, plain, d, 64, 65, chunk))
        assert torch.equal(narrow.state[1], plain.state[1].to(dtype))
        if tail:  # tokens of the open tile are not rounded
            assert torch.equal(narrow.keys[1, :, 0], d.k[64])
            assert torch.equal(narrow.values[1, :, 0], d.v[64])


def test_inputs_may_be_narrow() -> None:
    d = data().map(Tensor.bfloat16)
    for tail in FORMS.values():
        wanted = run(cpu, empty(d, tail), d.map(Tensor.float), 0, 70, 70)
        off = 2 * checks.out_bound(
            checks.Tokens(*d[slice(70)], d.slopes), wanted, torch.float32
        )  # both are sums
        for chunk in (0, 70):
            out = run(cpu, empty(d, tail), d, 0, 70, chunk)
            assert out.dtype == torch.bfloat16
            assert_close(out, wanted.double(), bounds.stored(wanted, torch.bfloat16) + off)


@pytest.mark.parametrize("tail", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slot_bytes_and_poison(tail: int, dtype: torch.dtype) -> None:
    shape = SlotShape(heads=3, dk=4, dv=7, dtype=dtype, tail=tail)
    store = StateStore(2, 5, **shape)
    parts = (store.state, store.keys, store.values)
    assert 5 * StateStore.slot_bytes(2, **shape) == sum(part.nbytes for part in parts)
    for part in parts:
        part.zero_()
    store.poison([0, 3])
    for view in store.views:
        for part in view.parts:
            assert part[[0, 3]].isnan().all()
            assert (part[[1, 2, 4]] == 0).all()
