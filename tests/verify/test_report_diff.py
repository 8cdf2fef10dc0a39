"""What two reports of a model say of each other: what is worse, and what only changed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

import reports
from trueline.errors import UsageError
from trueline.verify.report import Check, Measure, Place, Report, Status, encode
from trueline.verify.report.diff import ReportDiff, diff, require_comparable
from trueline.verify.report.diff_terminal import print_diff

NAN, INF = math.nan, math.inf
PASSED, FAILED, NOT_COVERED, ERROR = Status
FILES = Path("a.json"), Path("b.json")


def of(change: Callable[[Report], None]) -> ReportDiff:
    """Of a report with a change to the same without."""
    before, after = reports.with_faults(), reports.with_faults()
    change(after)
    return diff(before, after)


def named(report: Report, name: str) -> Check:
    return next(each for each in report.checks if each.id == name)


def text_of(a: Report, b: Report) -> str:
    file = io.StringIO()
    print_diff(Console(file=file, width=120, highlight=False), a, b, diff(a, b))
    return file.getvalue()


def test_the_same_has_no_difference() -> None:
    found = of(lambda report: None)
    empty = {name: [] for name in found.__struct_fields__}
    assert {name: getattr(found, name) for name in found.__struct_fields__} == empty
    assert text_of(reports.not_finite(), reports.not_finite()).startswith("nothing is worse\n")


def test_a_check_that_broke_off_has_not_lost_its_implementations() -> None:
    def broken(report: Report) -> None:
        first = next(each for each in report.checks if each.ran)
        first.ran = {}

    assert of(broken).ran == []


# -- statuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kind", "worse"),
    [
        (PASSED, FAILED, "failing", True),
        (PASSED, ERROR, "failing", True),
        (NOT_COVERED, FAILED, "failing", True),
        (None, FAILED, "failing", True),
        (PASSED, NOT_COVERED, "lost", True),
        (PASSED, None, "lost", True),
        (FAILED, NOT_COVERED, "lost", True),
        (ERROR, None, "lost", True),
        (FAILED, PASSED, "repaired", False),
        (ERROR, PASSED, "repaired", False),
        (NOT_COVERED, PASSED, "gained", False),
        (None, PASSED, "gained", False),
        (FAILED, ERROR, None, False),
        (PASSED, PASSED, None, False),
        (NOT_COVERED, None, None, False),
        (None, NOT_COVERED, None, False),
    ],
)
def test_statuses(
    before: Status | None, after: Status | None, kind: str | None, worse: bool
) -> None:
    a, b = reports.passing(), reports.passing()
    for report, status in ((a, before), (b, after)):
        if status is not None:
            report.checks.append(reports.check("new/one", status, measures=[], evidence="why"))
    found = diff(a, b)
    for name in ("failing", "lost", "repaired", "gained"):
        told = [(each.id, each.before, each.after) for each in getattr(found, name)]
        wanted = "new/one", str(before or "absent"), str(after or "absent")
        assert told == ([wanted] if name == kind else []), name
    assert bool(found.worse) == worse


def test_a_new_failure_says_where() -> None:
    text = text_of(reports.passing(), reports.failing())
    first, _, rest = text.partition("\n")
    assert first == "WORSE: 2 checks newly failing"
    assert "after   2026-03-01T09:30:00Z: FAILED, 22 passed, 1 failed, 1 ended in an error" in rest
    assert "modes/mixed step: passed → failed: layer 3, mixer, attention=native, request 2" in rest


# -- measures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "moved", "worse"),
    [
        ((1.0, 0.5, 9.0), (1.4, 0.5, 9.0), False, False),
        ((1.0, 0.5, 9.0), (1.6, 0.5, 9.0), True, True),
        ((1.6, 0.5, 9.0), (1.0, 0.5, 9.0), True, False),
        ((1.0, 0.5, 9.0), (1.6, 0.7, 9.0), False, False),
        ((1.0, 0.5, None), (1.6, 0.5, None), True, False),
        ((0.0, None, 0.0), (1e-9, None, 0.0), True, True),
        ((1.0, None, 2.0), (2.5, None, 2.0), False, False),
        ((1.0, None, None), (9.0, None, None), False, False),
        ((1.0, 0.5, 9.0), (NAN, 0.5, 9.0), True, True),
        ((1.0, None, None), (INF, None, None), True, True),
        ((NAN, 0.5, 9.0), (1.0, 0.5, 9.0), True, False),
        ((NAN, 0.5, 9.0), (NAN, 0.5, 9.0), False, False),
        ((INF, 0.5, 9.0), (INF, 0.5, 9.0), False, False),
        ((INF, 0.5, 9.0), (-INF, 0.5, 9.0), True, False),
        ((1.0, 0.0, 9.0), (1.0 + 1e-12, 0.0, 9.0), True, True),
    ],
)
def test_measures_that_moved_by_more_than_noise(
    before: tuple[float, float | None, float | None],
    after: tuple[float, float | None, float | None],
    moved: bool,
    worse: bool,
) -> None:
    a, b = reports.passing(), reports.passing()
    for report, (value, band, gate) in ((a, before), (b, after)):
        named(report, "ops/rope").measures = [
            Measure(name="worst row", value=value, band=band, gate=gate)
        ]
    found = diff(a, b)
    assert [(each.check, each.measure) for each in found.moved] == [
        ("ops/rope", "worst row")
    ] * moved
    assert bool(found.worse) == worse
    assert [each.worse for each in found.moved] == [worse] * moved


def test_of_measures_with_one_name_the_worst_is_compared() -> None:
    def change(report: Report) -> None:
        check = named(report, "ops/rope")
        (one,) = check.measures
        check.measures = [replace(one, value=0.0), one, replace(one, value=0.0)]

    assert of(change).moved == []


# -- around them -------------------------------------------------------------------------


def test_what_changed_around_it() -> None:
    def change(report: Report) -> None:
        report.environment = reports.environment(torch="2.12.0", gpu="a GPU")
        report.model = replace(report.model, fingerprint="other", name="elsewhere")
        report.options = {"block_size": "32"}
        report.tier, report.only = "smoke", ["ops"]
        report.power, report.faults = [], []
        report.plan[2] = "attention    cpu (asked for)"
        for check in report.checks[:5]:
            check.ran = {"attention": "cpu"}

    found = of(change)
    told = {each.what: (each.before, each.after) for each in found.setting}
    assert told == {
        "name": ("witness-v3", "elsewhere"),
        "fingerprint": ("4f1c" * 8, "other"),
        "torch": ("2.11.0", "2.12.0"),
        "gpu": ("none", "a GPU"),
        "option device": ("cpu", "default"),
        "option block_size": ("default", "32"),
        "tier": ("standard", "smoke"),
        "only": ("none", "ops"),
        "injected errors": ("8", "0"),
        "known bugs tried": ("33", "0"),
    }
    assert found.plan_added == ["attention    cpu (asked for)"]
    assert found.plan_removed == ["attention    native (fits, and is the fastest here)"]
    ran = [(each.what, each.before, each.after) for each in found.ran]
    assert ran == [
        ("attention in 5 checks", "native", "cpu"),
        ("experts in 5 checks", "native", "none"),
    ]
    assert found.worse == [], "another setting is not worse in itself"


@pytest.mark.parametrize(("factor", "told"), [(1.9, 0), (0.51, 0), (2.1, 1), (0.49, 1), (NAN, 1)])
def test_noise_bands_that_changed(factor: float, told: int) -> None:
    def change(report: Report) -> None:
        report.bands[0] = replace(report.bands[0], value=report.bands[0].value * factor)

    found = of(change)
    assert len(found.bands) == told
    assert found.worse == []


@pytest.mark.parametrize(
    ("smallest", "told", "worse"),
    [
        (2.0**-8, 0, False),
        (2.0**-7, 1, False),
        (2.0**-6, 1, True),
        (None, 1, True),
        (2.0**-11, 1, False),
    ],
)
def test_errors_that_are_seen_less_well(smallest: float | None, told: int, worse: bool) -> None:
    def change(report: Report) -> None:
        place = replace(report.power[0].place, implementation="cpu")
        report.power[0] = replace(report.power[0], place=place, smallest=smallest)

    found = of(change)
    assert len(found.power) == told
    assert bool(found.worse) == worse


def test_where_nothing_was_seen_before_nothing_is_lost() -> None:
    def change(report: Report) -> None:
        missed = next(i for i, each in enumerate(report.power) if each.smallest is None)
        report.power[missed] = replace(report.power[missed], smallest=0.5)

    (power,) = of(change).power
    assert (power.before, power.after, power.worse) == (None, 0.5, False)


def test_known_bugs_that_survive_now() -> None:
    def change(report: Report) -> None:
        outcomes = {"fault-0": "survived", "fault-1": "no effect", "decode-rows-shifted": "caught"}
        report.faults = [
            replace(each, outcome=outcomes.get(each.id, each.outcome)) for each in report.faults
        ]

    found = of(change)
    assert [(each.id, each.before, each.after, each.worse) for each in found.faults] == [
        ("fault-0", "caught", "survived", True),
        ("fault-1", "caught", "no effect", False),
        ("decode-rows-shifted", "survived", "caught", False),
    ]
    assert found.worse == ["1 known bug no longer caught"]
    assert diff(reports.passing(), reports.with_faults()).faults == [], "one run had none"


# -- the two -------------------------------------------------------------------------------


def test_another_model_is_not_compared() -> None:
    a, b = reports.passing(), reports.passing()
    b.model = replace(
        b.model, name="moved", fingerprint="downloaded again", bytes=1, dtype="float32"
    )
    require_comparable(a, b, FILES)
    for change in ({"family": "glm5"}, {"layers": 5}, {"parameters": 1}):
        b.model = replace(a.model, **change)
        with pytest.raises(UsageError, match=r"a\.json .* b\.json .* differ; accepted") as caught:
            require_comparable(a, b, FILES)
        assert next(iter(change)) in str(caught.value)


@pytest.mark.parametrize("name", reports.ALL)
def test_every_report_can_be_compared(name: str) -> None:
    a, b = reports.passing(), reports.ALL[name]()
    b.model = a.model
    for before, after in ((a, b), (b, a)):
        found = diff(before, after)
        assert encode(found)
        text = text_of(before, after)
        assert "\x1b" not in text
        assert text.startswith("WORSE" if found.worse else "nothing is worse")


def test_long_lists_are_cut() -> None:
    a, b = reports.huge(checks=1), reports.huge(checks=1)
    for check in b.checks:
        check.status, check.place = Status.FAILED, Place(layer=1)
    text = text_of(a, b)
    assert "WORSE: 87 checks newly failing" in text
    assert "… and 47 more" in text
