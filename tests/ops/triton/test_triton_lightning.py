"""Linear attention in Triton, run by the interpreter. Small chunks, so that few tokens meet every
edge; whole sizes are slow."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from implementations import lightning_dims
from trueline.cache.state import StateStore, StateView
from trueline.ops.capabilities import Context
from trueline.ops.launch import can_copy
from trueline.ops.lightning import StateRow, StateTable, cpu, kernels
from trueline.ops.lightning import triton as lightning
from trueline.ops.lightning.triton import NO_SLOT, DecodeLaunch, PrefillLaunch
from trueline.verify.bounds import AROUND, chain_bound, rounding
from trueline.verify.ops import lightning as checks
from trueline.verify.ops import randn

WIDE = DecodeLaunch(values=64, warps=4)
SMALL = PrefillLaunch(chunk=16, values=64, warps=4, stages=1, programs=264)
each_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16]
)


def op(decode: DecodeLaunch = WIDE, prefill: PrefillLaunch = SMALL) -> SimpleNamespace:
    """The module with launches of ours."""
    return SimpleNamespace(
        capabilities=lightning.capabilities,
        prepare=lightning.prepare,
        decode=partial(lightning.decode, launch=decode),
        prepare_prefill=lightning.prepare_prefill,
        prefill=partial(lightning.prefill, launch=prefill),
    )


# -- numbers ---------------------------------------------------------------------------


def test_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own launch: narrow programs, of which each has whole tiles."""
    with lightning_dims(monkeypatch, 128, 32, room=(8, 8)):
        checks.any_cuts(lightning, torch.float16, length=9)


@each_dtype
def test_any_cuts(dtype: torch.dtype) -> None:
    checks.any_cuts(op(), dtype, length=19)


@each_dtype
def test_strong_decay(dtype: torch.dtype) -> None:
    checks.any_decay(op(), dtype, length=18, steps=3)


@pytest.mark.parametrize(
    ("dtype", "chunk"),
    [pytest.param(torch.float32, 16, marks=pytest.mark.slow), (torch.float16, 64)],
)
def test_slots(dtype: torch.dtype, chunk: int) -> None:
    """With walks of one chunk, and with one walk a row."""
    checks.free_slots(op(prefill=replace(SMALL, chunk=chunk)), dtype)


@pytest.mark.slow
@each_dtype
def test_whole_checks(dtype: torch.dtype) -> None:
    checks.any_cuts(lightning, dtype)
    checks.free_slots(lightning, dtype)


@pytest.mark.slow
def test_weak_decay_of_many_steps() -> None:
    checks.any_decay(op())


def test_snapshots_whatever_the_walks() -> None:
    """Two chunks a walk; tiles of some values only."""
    checks._snapshots(op(prefill=PrefillLaunch(32, 32, 4, 1, 20)), 0)


@triton.jit
def decay_of(x: Any, keep: Any, loss: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    a, b = kernels.decay(tl.load(x + i))
    tl.store(keep + i, a)
    tl.store(loss + i, b)


def test_weak_decay_is_known_to_its_last_digits() -> None:
    """Thousands of steps multiply by it: its loss must not come from a difference to 1."""
    x = torch.cat((torch.zeros(1), torch.logspace(-7, 2.5, 511)))
    keep, loss = torch.empty(2, 512)
    decay_of[(1,)](x, keep, loss, N=512)
    weak = keep == 1
    assert weak.sum() > 300
    assert torch.allclose(
        loss[weak].double(), torch.expm1(-x[weak].double()), rtol=rounding(AROUND), atol=0
    )
    assert (loss[~weak] == 0).all()
    # exp loses as many units as its argument is large; what is below is no normal number
    wanted = torch.exp(-x[~weak].double())
    accepted = rounding(1) * (AROUND + x[~weak]) * wanted + torch.finfo(torch.float32).tiny
    assert bool(((keep[~weak] - wanted).abs() <= accepted).all())
    assert x[weak].max() > 0.6  # a factor of 1/2 has lost nothing


def test_decode_does_not_drift() -> None:
    """A decay half way between two numbers of float32: rounded, it would err by 3e-8 a step."""
    steps, slope = 240, -math.log1p(-1000.5 * 2**-24)
    view = StateStore(1, 2, heads=1, dk=4, dv=4, dtype=torch.float32, tail=0).views[0]
    view.state[1] = 1
    zeros = torch.zeros(1, 1, 4)
    given = {"slopes": torch.tensor([slope]), "scale": 1.0}
    prepared = lightning.prepare([StateRow(9, 1, 1)])
    for _ in range(steps):
        op(decode=DecodeLaunch(4, 4)).decode(zeros, zeros, zeros, view, prepared, **given)
    off = view.state[1].double() / math.exp(-slope * steps) - 1
    assert off.abs().max() < chain_bound(steps) < 0.5 * steps * 2**-25


def test_large_states_fit_float16() -> None:
    """Without decay a state grows beyond what float16 holds, while outputs need not."""
    heads, d, count = 1, 16, 16
    store = StateStore(1, 2, heads=heads, dk=d, dv=d, dtype=torch.float32, tail=0)
    view = store.views[0]
    view.state[1] = 3e5 * randn(heads, d, d)
    q, k, v = (randn(count, heads, d, seed=i).half() for i in range(3))
    q *= 1e-3
    given = {"slopes": torch.tensor([1e-5]), "scale": 0.1}
    copy = StateView(view.state.clone(), view.keys, view.values)
    parts = [(slice(0, count), StateRow(9, 1, 1))]
    out = op().prefill(q, k, v, view, lightning.prepare_prefill(parts), **given)
    wanted = cpu.prefill(q.float(), k.float(), v.float(), copy, parts, **given)
    # of what state and queries make, rounded; the same of the tokens' own is tiny beside it
    assert (out.double() - wanted).norm() <= rounding(2, torch.float16) * wanted.norm()


@pytest.mark.parametrize("kept", [torch.float16, torch.float32])
def test_states_are_rounded_where_they_are_written(kept: torch.dtype) -> None:
    t = checks.tokens(37)
    view, plain = checks.slots(0, 2, kept), checks.slots(0, 2)
    for chunk in (37, 0):
        stop = 37 if chunk else 1
        for each in (view, plain):
            checks.run(op(), each, t, 0, stop, chunk)
        assert torch.equal(view.state[1], plain.state[1].to(kept))


# -- rows ------------------------------------------------------------------------------


def test_a_table_serves_padded_rows() -> None:
    """Rows that fill up name the null slot: they start from zeros and read nothing, NaN or not."""
    t, (wanted, off) = checks.tokens(), checks.exact()
    view = checks.slots(0, 6)
    checks.run(cpu, view, t, 0, 20, 20, slot=2)
    rows = [StateRow(20, 2, 3, ((21, 4),)), StateRow(0, None, 5), StateRow(0, None, 0)]
    table = StateTable.of(rows, torch.device("cpu"))
    at = [20, 0, 0]
    out = op().decode(t.q[at], t.k[at], t.v[at], view, lightning.prepare(table),
                      slopes=t.slopes, scale=checks.SCALE)  # fmt: skip
    checks.within("lightning, table", out, wanted[at], off[at])
    assert torch.equal(view.state[3], view.state[4])
    assert view.state[1].isnan().all()


def test_a_table_refuses_rows_that_would_race() -> None:
    rows = [StateRow(3, 1, 2), StateRow(3, 1, 1)]
    with pytest.raises(AssertionError, match=r"rows \[0\] read what another writes"):
        StateTable.of(rows, torch.device("cpu"))
    padded = [StateRow(1, 0, 0), StateRow(1, 0, 0), StateRow(2, 5, 4), StateRow(2, 5, 3)]
    StateTable.of(padded, torch.device("cpu"))


def test_rows_may_swap_their_slots() -> None:
    t, (wanted, off) = checks.tokens(), checks.exact()
    view = checks.slots(0, 4)
    starts = {1: 5, 2: 9, 3: 12}
    for slot, start in starts.items():
        checks.run(cpu, view, t, 0, start, start, slot=slot)
    rows = [StateRow(starts[source], source, slot) for source, slot in ((1, 2), (2, 3), (3, 1))]
    at = list(starts.values())
    out = op().decode(t.q[at], t.k[at], t.v[at], view, lightning.prepare(rows),
                      slopes=t.slopes, scale=checks.SCALE)  # fmt: skip
    checks.within("lightning, swapped", out, wanted[at], off[at])


def test_what_it_refuses() -> None:
    refusals = lightning.capabilities.refusals
    assert not refusals(Context(dtype=torch.bfloat16))
    assert refusals(Context(dtype=torch.float64)) == [
        "torch.float64 is not float32, float16 or bfloat16"
    ]
    assert refusals(Context(dtype=torch.float32, batch_invariant=True))
    t = checks.tokens(37)
    with pytest.raises(AssertionError, match="batch-invariant mode"):
        checks.run(op(), checks.slots(64, 2), t, 0, 1, 1)


def test_legs_end_where_slots_take_the_state() -> None:
    row = StateRow(10, 1, 2, ((14, 3), (20, 4)))
    legs = list(lightning._legs(100, 110, row, 6))
    assert legs == [[(100, 104, 3), (104, 106, NO_SLOT)], [(106, 110, 2), (110, 110, 4)]]


@pytest.mark.parametrize(
    ("heads", "counts", "values", "chunks"),
    [
        (16, [1024], 16, 16),  # short: narrow programs are enough
        (64, [1024], 32, 16),
        (16, [1024] * 5, 64, 16),
        (4, [1024], 16, 4),
        (16, [8192], 64, 16),
        (16, [4096] * 8, 64, 64),  # rows enough
        (16, [200], 16, 4),
        (16, [8192, 64, 64], 64, 16),
    ],
)
def test_walks_fill_the_gpu(heads: int, counts: list[int], values: int, chunks: int) -> None:
    launch = lightning.prefill_launch(torch.bfloat16, (heads, 128, 128), counts, 132, True)
    assert (launch.values, launch.walk_chunks(heads, 128, counts)) == (values, chunks)


@pytest.mark.parametrize(
    ("dk", "dv", "ahead"),
    [(37, 128, True), (128, 41, True), (256, 64, True), (128, 128, False), (64, 32, False)],
)
def test_narrow_programs_read_what_is_copied_ahead(dk: int, dv: int, ahead: bool) -> None:
    """Others were given wrong numbers by the assembler."""
    launch = lightning.prefill_launch(torch.bfloat16, (16, dk, dv), [1024], 132, ahead)
    assert (launch.values, launch.stages) == (64, 2)


@pytest.mark.parametrize(
    ("first", "row", "ahead"), [(0, 256, True), (8, 272, True), (1, 256, False), (8, 264, False)]
)
def test_copied_ahead_is_what_is_known_to_be_whole(first: int, row: int, ahead: bool) -> None:
    """Rows of 264 are whole pieces too, but Triton does not know."""
    x = torch.zeros(1024, dtype=torch.bfloat16).as_strided((3, 2, 32), (row, 64, 1), first)
    assert can_copy(x) == ahead
