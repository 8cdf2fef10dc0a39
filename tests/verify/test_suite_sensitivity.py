"""How small an error `trueline verify` sees in the worst row and in the median one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trueline.plan import plan
from trueline.reference.model import MIX
from trueline.verify.replay import record
from trueline.verify.report import Check, Place, Status
from trueline.verify.suite import compositions, power
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.judgement import (
    FACTOR,
    FLOOR,
    MEDIAN_FACTOR,
    MEDIAN_OF,
    BandOf,
    Judgement,
    Off,
    place_of,
    relative,
)
from trueline.verify.suite.noise import note_noise
from trueline.verify.suite.numbers import Numbers, _measures
from trueline.verify.suite.sequences import RequestRows
from trueline.verify.suite.session import Session
from verified import injected, made


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    model, config = made("v3-near", tmp_path_factory.mktemp("sensitivity"))
    measured = Numbers(Session("v3-near", model, config))
    measured.run(next(iter(compositions.compositions(measured.session))))
    return measured


def test_a_row_may_be_as_far_off_as_noise_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no further: a sum that nearly cancels has more of it than those of the band."""
    session = Session("v3", *made("v3-near", tmp_path))
    numbers = Numbers(session)
    first = next(iter(compositions.compositions(session)))
    numbers.run(first)
    ran = numbers.ran[first.name].requests
    row, exact = ran.observed[0].outputs[1, MIX], ran.observed[0].outputs[1, MIX][5].clone()

    def is_wrong(size: float) -> bool:
        row[5] = exact * (1 + size)
        judged = numbers.judge.judge([ran], [], numbers.bands, [1])
        return (1, "mixer") in {each.off[:2] for each in judged.wrong()}

    assert is_wrong(0.9 * FACTOR * 1e-3)
    plain = RequestRows._half
    monkeypatch.setattr(RequestRows, "_half", lambda *given: plain(*given) * (1 + 1e-3))
    assert not is_wrong(0.9 * FACTOR * 1e-3)
    assert is_wrong(1.1 * FACTOR * 1e-3)
    assert is_wrong(float("nan"))


@pytest.mark.parametrize("part", ["mixer", "feed forward"])
def test_errors_are_seen_in_their_layer_and_no_other(numbers: Numbers, part: str) -> None:
    """A little above what is accepted it is seen there and nowhere else; far below it is not."""
    bands = numbers.bands
    assert bands is not None
    layer = 2
    gate = bands.gate(layer, part)
    put = power._on_output(layer, "mixer" if part == "mixer" else "feed_forward")
    for size, seen in ((3 * gate, True), (gate / 8, False)):
        found = injected(numbers, put, size)
        places = {each.off[:2] for each in found.wrong()}
        assert places == ({(layer, part)} if seen else set())


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_errors_of_every_row_are_seen_below_what_the_worst_may_have(
    numbers: Numbers, path: str
) -> None:
    """Where they are in decode alone, too: its rows are few among all."""
    bands, in_decode = numbers.bands, path == "decode"
    assert bands is not None
    layer, part = 2, "mixer"
    kind = bands.kinds[layer][part]
    typical = max(bands.bands[BandOf(part, kind, median=True)], FLOOR)
    assert 1.5 * MEDIAN_FACTOR * typical < bands.gate(layer, part) / 2
    for size, seen in ((1.5 * MEDIAN_FACTOR, True), (0.4 * MEDIAN_FACTOR, False)):
        put = power._on_output(layer, part, decode_only=in_decode)
        wrong = list(injected(numbers, put, size * typical).wrong())
        assert {each.off[:2] for each in wrong} == ({(layer, part)} if seen else set())
        assert (path in {each.rows.rpartition(" ")[2] for each in wrong}) == seen


MIXER = BandOf("mixer", "mixer")


def test_medians() -> None:
    """Of enough rows, prefill and decode apart, beside noise of their own."""
    found = Judgement(bands={MIXER: 1.0, MIXER._replace(median=True): 0.01})
    values = torch.full((2 * MEDIAN_OF,), 0.03, dtype=torch.float64)
    decode = torch.arange(2 * MEDIAN_OF) >= MEDIAN_OF
    values[decode] = 0.05
    off = Off(0, "mixer", "x", 0, torch.arange(2 * MEDIAN_OF), values, decode)
    (wrong,) = found.wrong_of(off)
    assert (wrong.position, wrong.value, wrong.accepted) == (MEDIAN_OF, 0.05, 0.04)
    assert str(wrong) == "off by 0.05 (median of 5 rows in decode), accepted 0.04"
    few = off._replace(positions=off.positions[:-1], values=values[:-1], decode=decode[:-1])
    assert found.wrong_of(few) == []
    assert found.wrong_of(off._replace(decode=None)) == []
    assert found.wrong_of(off._replace(noise=0.3 * values)) == []
    (wrong,) = found.wrong_of(off._replace(noise=0.2 * values.flip(0)))
    assert wrong.rows.endswith("decode")


def test_medians_of_a_kind() -> None:
    """The first position named is one that is off."""
    of = BandOf("mixer", "linear attention")
    kinds = {0: {"mixer": of.kind}}
    found = Judgement(bands={of: 1.0, of._replace(median=True): 0.01}, kinds=kinds)
    at, values = torch.arange(MEDIAN_OF), torch.full((MEDIAN_OF,), 0.03, dtype=torch.float64)
    off = Off(0, "mixer", "x", 0, at, values, at < 0)
    assert found.wrong_of(off) == []
    values[:2], values[2:] = 0.001, 0.05
    (wrong,) = found.wrong_of(off)
    assert wrong.position == 2


def test_the_widest_noise_of_a_kind_is_its_band() -> None:
    found = Judgement(kinds={0: {}, 1: {}})
    note_noise(found, 0, "mixer", torch.tensor([3.0, 2.0, 1.0]))
    note_noise(found, 1, "mixer", torch.tensor([0.3, 0.2, 0.1]))
    assert found.bands == {MIXER: 3.0, MIXER._replace(median=True): 2.0}


def test_noise_that_is_measured_again_is_limited(numbers: Numbers) -> None:
    """In a replay in another dtype: of an entry, a half and the head."""
    judge, definition = numbers.judge, numbers.session.definition
    request = next(iter(numbers.ran.values())).requests.observed[0]
    one = judge.residual(request, 1, MIX)
    half, _ = judge.one_half((1, MIX), request, 1, residual=one, limit={MIXER: 1e-30})
    assert {of.part for of in half.bands} >= {"entry", "mixer"}
    last = judge.residual(request, definition.num_layers, MIX)
    head, _ = judge.the_head(request, last, Judgement(), limit={BandOf("head", "head"): 1e-30})
    assert head.bands
    assert max(*half.bands.values(), *head.bands.values()) <= 1e-30


def test_measures_of_the_median() -> None:
    """Of the layer whose median is furthest beyond what is accepted there, and at its place."""
    bands = {BandOf("mixer", kind): 1.0 for kind in "ab"}
    bands |= {BandOf("mixer", "a", median=True): 0.1, BandOf("mixer", "b", median=True): 0.001}
    at = torch.arange(MEDIAN_OF)
    offs = [
        Off(layer, "mixer", "x", 0, at, torch.full((MEDIAN_OF,), value).double(), at < 0)
        for layer, value in enumerate((0.2, 0.01))
    ]
    offs[1].values[0] = 0.0
    judgement = Judgement(offs, bands, kinds={0: {"mixer": "a"}, 1: {"mixer": "b"}})
    numbers: Any = SimpleNamespace(place=place_of)
    row, middle = _measures(numbers, judgement, "x")
    assert row.place is not None
    assert (row.name, row.place.layer, row.place.position) == ("mixer", 0, 0)
    assert middle.place is not None
    assert (middle.name, middle.value) == ("mixer, median row", pytest.approx(0.01))
    assert (middle.band, middle.gate) == (0.001, 0.004)
    assert (middle.place.layer, middle.place.position, middle.good) == (1, 1, False)


@pytest.fixture
def every_row_off(tmp_path: Path) -> tuple[Numbers, Composition, float]:
    """A little: more than the median row may be, less than half of what the worst may."""
    numbers = Numbers(Session("v3", *made("v3-near", tmp_path)))
    first = next(iter(compositions.compositions(numbers.session)))
    bands = numbers.run(first)
    size = 1.5 * MEDIAN_FACTOR * max(bands.band(1, "mixer", median=True), FLOOR)
    assert size < bands.gate(1, "mixer") / 2
    rows = numbers.ran[first.name].requests.observed[0].outputs[1, MIX]
    for p, row in rows.items():
        rows[p] = row * (1 + size)
    return numbers, first, size


def test_noise_of_their_own_explains_medians(
    every_row_off: tuple[Numbers, Composition, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a long context, where it is larger than that of the band."""
    numbers, first, size = every_row_off
    ran = numbers.ran[first.name].requests

    def is_wrong() -> bool:
        found = numbers.judge.judge([ran], [], numbers.bands, [1])
        return bool(list(found.only("mixer").wrong()))

    assert is_wrong()
    plain = RequestRows._half
    monkeypatch.setattr(RequestRows, "_half", lambda *given: plain(*given) * (1 + size / 2))
    assert not is_wrong()


def test_the_record_of_a_median(every_row_off: tuple[Numbers, Composition, float]) -> None:
    numbers, first, size = every_row_off
    place = Place(layer=1, part="mixer", request=0, position=0)
    check = Check(id="x", invariant="x", what="x", status=Status.FAILED, place=place)
    half = record.record(numbers, check, first).header.half
    assert half is not None
    assert half.value == pytest.approx(size, rel=0.5)
    assert half.value > half.accepted


def test_an_error_at_one_position_is_named(numbers: Numbers) -> None:
    first = next(iter(compositions.compositions(numbers.session)))
    with numbers.session.core() as core:
        ran = compositions.serve_watched(numbers.session.drawn, first, core)
    request = ran.requests.observed[0]
    key = next(key for key in request.outputs if key[0] == 1)
    row = request.outputs[key][17]
    request.outputs[key][17] = row * (1 + 1e-3)
    found = numbers.judge.judge([ran.requests], [], numbers.bands)
    first_wrong = found.first_wrong()
    assert first_wrong is not None
    assert (first_wrong.off.layer, first_wrong.position) == (1, 17)


def test_power_is_near_the_band(numbers: Numbers) -> None:
    """Of each place the smallest error that is seen is small, and named right."""
    rows = list(power.measure(numbers, lambda done, total: None))
    assert len(rows) >= 10
    for row in rows:
        assert row.smallest is not None
        assert row.named is not None
        assert row.smallest < 1e-4
        assert row.named.layer == row.place.layer
        assert row.named.part == row.place.part
        assert row.unseen is not None
        assert row.unseen < row.smallest


@pytest.mark.parametrize("name", ["v3-near", "ling"])
def test_power_in_sixteen_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the worst row of noise alone hides a quarter of every row."""
    monkeypatch.setattr(plan, "choose_compute_dtype", lambda *given: (torch.bfloat16, "as told"))
    model, config = made(name, tmp_path, dtype="bfloat16")
    numbers = Numbers(Session(name, model, config))
    first = next(iter(compositions.compositions(numbers.session)))
    assert not list(numbers.run(first).wrong())
    rows = list(power.measure(numbers, lambda done, total: None))
    assert max(row.smallest or 1 for row in rows) <= 2**-4


def test_rows_are_measured_one_by_one() -> None:
    exact = torch.ones(4, 3, dtype=torch.float64)
    exact[1] = 1000
    ours = exact.clone()
    ours[2] *= 1.01
    off = relative(ours, exact)
    assert off.argmax() == 2
    assert float(off[2]) == pytest.approx(0.01)
    assert off[[0, 1, 3]].max() == 0


def test_nan_is_wrong() -> None:
    found = Judgement(bands={MIXER: 1e-6})
    values = torch.tensor([0.0, torch.nan], dtype=torch.float64)
    off = Off(0, "mixer", "x", 0, torch.tensor([4, 5]), values)
    found.offs.append(off)
    first = found.first_wrong()
    assert first is not None
    assert first.position == 5
    many = torch.full((MEDIAN_OF,), torch.nan, dtype=torch.float64)
    rows = torch.arange(MEDIAN_OF)
    (middle,) = found.medians(off._replace(positions=rows, values=many, decode=rows < 0))
    assert (middle.position, middle.value) == (0, torch.inf)


def test_gates_come_from_the_band() -> None:
    found = Judgement(bands={MIXER: 1e-3})
    assert found.gate(0, "mixer") == pytest.approx(FACTOR * 1e-3)
    assert found.accepted(0, "experts") == 0
