"""Reports as files, and the numbers and sentences that every view of one shares."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import reports
from trueline.errors import UsageError
from trueline.verify.report import (
    Check,
    FaultRow,
    Measure,
    Place,
    Power,
    Report,
    Status,
    encode,
    read,
    wording,
    write,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("name", reports.ALL)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    report = reports.ALL[name]()
    write(report, tmp_path / "report.json")
    assert encode(read(tmp_path / "report.json")) == encode(report)


def test_numbers_that_json_has_no_word_for(tmp_path: Path) -> None:
    """They stay numbers: null would be "not measured", and no reader may trip over the file."""
    file = tmp_path / "report.json"
    write(reports.not_finite(), file)

    def refused(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    found = json.loads(file.read_text(), parse_constant=refused)
    curve = next(each for each in found["curves"] if each["title"] == "of each")
    assert curve["values"] == ["nan", "inf", 0.0, 1e-3]
    measures = next(each.measures for each in read(file).checks if each.id == "modes/mixed step")
    assert math.isnan(measures[0].value)
    assert [each.value for each in measures[1:]] == [INF, -INF]
    assert measures[2].gate is None


def test_numbers_and_versions_of_other_packages(tmp_path: Path) -> None:
    class Version(str):
        pass

    report = reports.passing()
    report.environment = reports.environment(torch=Version("2.11.0+cpu"))
    report.checks[0].measures = [Measure(name="worst", value=np.float64(0.5), gate=np.float64(NAN))]
    write(report, tmp_path / "report.json")
    found = read(tmp_path / "report.json")
    assert found.environment.torch == "2.11.0+cpu"
    assert found.checks[0].measures[0].value == 0.5
    report.checks[0].measures = [Measure(name="worst", value=1j)]  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="complex"):
        encode(report)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "not readable"),
        (b"", "no JSON object"),
        (b"[1]", "no JSON object"),
        (b'{"\xff": 1}', "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"settings": {}}', "no report of trueline verify"),
        (b'{"format": "1", "checks": []}', "no report of trueline verify"),
        (b'{"format": 0, "checks": []}', "no report of trueline verify"),
        (b'{"format": 2, "checks": [{"new": 1}]}', "format 2, written by a newer Trueline"),
        (b'{"format": 1, "checks": [{"id": 3}]}', "damaged"),
    ],
)
def test_other_files_are_refused_by_name(content: bytes | None, told: str, tmp_path: Path) -> None:
    file = tmp_path / "what.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=r"what\.json") as caught:
        read(file)
    assert told in str(caught.value)
    assert content is None or "accepted: a report" in str(caught.value)


def test_an_unknown_status_is_not_guessed_at(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(encode(reports.passing()).replace(b'"passed"', b'"fine"', 1))
    with pytest.raises(UsageError, match=r"fine.*checks\[0\]\.status"):
        read(file)


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.report\.json: not writable"):
        write(reports.passing(), tmp_path / "nowhere" / "report.json")


# -- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (3.0, "3"),
        (65504.0, "65504"),
        (0.41234, "0.412"),
        (12.345, "12.3"),
        (1234.5, "1.23e3"),
        (0.051, "5.1e-2"),
        (1e-3, "1e-3"),
        (9.9999e-4, "1e-3"),
        (-3.14159e-12, "-3.14e-12"),
        (1e300, "1e300"),
        (NAN, "NaN"),
        (INF, "inf"),
        (-INF, "-inf"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert wording.number(value) == text


def test_sizes_of_injected_errors() -> None:
    told = {2.0**-9: "2^-9", 0.5: "2^-1", 1.0: "1", 4.0: "4", 0.3: "0.3", 0.0: "0", INF: "inf"}
    assert {value: wording.size(value) for value in told} == told
    assert wording.size(NAN) == "NaN"


def test_a_bad_measure_never_reads_like_a_good_one() -> None:
    close = Measure(name="", value=1.0000001, band=0.25, gate=1.0)
    assert wording.measured(close) == "1.0000001 (band 0.25, accepted 1)"
    # two digits of the gate would say 0.0014 against 0.0015
    near = Measure(name="", value=1.46e-3, gate=1.454e-3)
    value, _, gate = wording.figures(near)
    assert float(value) > float(gate)
    assert wording.measured(Measure(name="", value=NAN, gate=NAN)) == "NaN (accepted NaN)"
    assert wording.measured(Measure(name="", value=2.0)) == "2"


def test_what_is_worst() -> None:
    order = [
        Measure(name="for information", value=99.0),
        Measure(name="exact", value=0.0, gate=0.0),
        Measure(name="endless gate", value=INF, gate=INF),
        Measure(name="half", value=0.5, gate=1.0),
        Measure(name="at its gate", value=1.0, gate=1.0),
        Measure(name="over", value=2.0, gate=1.0),
        Measure(name="not finite", value=NAN, gate=1.0),
    ]
    severities = [wording.severity(each) for each in order]
    assert severities == sorted(severities)
    assert wording.severity(Measure(name="", value=1e-30, gate=0.0)) == INF
    assert [each.good for each in order] == [True] * 5 + [False] * 2
    worst = wording.worst(order)
    assert worst is not None
    assert worst.name == "not finite"


# -- sentences -------------------------------------------------------------------------


def with_statuses(*statuses: Status) -> Report:
    report = reports.empty()
    report.checks = [reports.check(f"a/{i}", status) for i, status in enumerate(statuses)]
    return report


def test_not_covered_is_never_passed() -> None:
    passed, not_covered = Status.PASSED, Status.NOT_COVERED
    told = {
        (): ("NOTHING PASSED", "no checks"),
        (not_covered,): ("NOTHING PASSED", "1 not covered"),
        (passed, not_covered): ("PASSED", "1 passed, 1 not covered"),
        (passed, Status.ERROR): ("FAILED", "1 passed, 1 ended in an error"),
        (passed, Status.FAILED, not_covered): ("FAILED", "1 passed, 1 failed, 1 not covered"),
    }
    for statuses, (word, sentence) in told.items():
        verdict = wording.verdict(with_statuses(*statuses))
        assert (verdict.word, verdict.sentence, verdict.good) == (word, sentence, word == "PASSED")


def test_the_first_wrong_is_the_first_with_a_place() -> None:
    report = with_statuses(Status.FAILED, Status.FAILED)
    assert wording.first_wrong(report) is report.checks[0]
    report.checks[1].place = Place(layer=0)
    assert wording.first_wrong(report) is report.checks[1]
    assert wording.first_wrong(with_statuses(Status.PASSED)) is None


def test_what_was_asked_for_is_told() -> None:
    report = reports.passing()
    assert wording.asked_for(report) == "standard"
    report.only, report.skip = ["ops", "layers"], ["ops/norm"]
    assert wording.asked_for(report) == "standard; only ops, layers; without ops/norm"


def power(smallest: float | None, layer: int = 3, unseen: float | None = None) -> Power:
    return Power(
        place=Place(layer=layer),
        what="softmax scale off by",
        smallest=smallest,
        unseen=unseen,
        caught_by=None,
        named=None,
    )


def test_the_weakest_place_decides_what_would_have_been_noticed() -> None:
    def told(*powers: Power) -> tuple[str | None, str | None]:
        (summary,) = wording.power_summaries(powers)
        return wording.noticed(summary), wording.not_noticed(summary)

    assert told(power(2.0**-9)) == ("softmax scale off by: 2^-9 in layer 3", None)
    several = told(power(2.0**-9), power(2.0**-7, 5), power(2.0**-8, 6))
    weakest = "softmax scale off by: 2^-7 in layer 5, the weakest of 3 places (best: 2^-9)"
    assert several == (weakest, None)
    assert told(power(0.5, 1), power(0.5, 2))[0] == (
        "softmax scale off by: 2^-1 in layer 1, the weakest of 2 places"
    )
    seen, missed = told(power(0.25), power(None, 7, 0.25), power(None, 8, 0.5))
    assert seen == "softmax scale off by: 2^-2 in layer 3"
    assert missed == "softmax scale off by: 2^-1 in layer 8, nor in 1 other place"
    both, _ = told(power(0.25, 1), power(0.25, 2), power(None, 7))
    assert both == "softmax scale off by: 2^-2 in layer 1, the weakest of 2 places"
    assert told(power(None)) == (None, "softmax scale off by: in layer 3")


def test_whether_the_right_layer_was_named() -> None:
    def told(named: Place | None, smallest: float | None = 0.5) -> str:
        one = Power(
            place=Place(layer=3),
            what="",
            smallest=smallest,
            unseen=None,
            caught_by=None,
            named=named,
        )
        return wording.naming(one)

    assert told(Place(layer=3, part="mixer")) == "right layer named"
    assert told(Place(layer=4)) == "named layer 4"
    assert told(None) == "no place named"
    assert told(None, None) == ""


def test_faults_that_survived_come_first_and_no_outcome_is_lost() -> None:
    found = wording.outcomes(
        FaultRow(id="", what="", outcome=each) for each in ("new word", "caught", "survived")
    )
    assert list(found) == ["survived", "caught", "new word"]


def test_text_cannot_steer_who_shows_it() -> None:
    shown = wording.clean(reports.HOSTILE)
    assert shown == "</script><b>&\"'\\x1b[31m\\x00\\u202e[bold]{{7*7}}]]>\\ud800"
    assert wording.clean("a\tb\nc é 日 …") == "a\tb\nc é 日 …"
    assert wording.token_text(" a\n\x1b") == "␣a↵\\x1b"
    assert wording.line("a\n  b\r") == "a b\\r"
    assert wording.replay_command("a b'c") == "trueline replay 'a b'\"'\"'c'"


def test_places_read_well() -> None:
    assert str(Place(layer=0, path="decode")) == "layer 0 (decode)"
    assert str(Place(path="decode")) == "(decode)"
    assert wording.where(Place(request=0, composition="mixed step")) == "request 0 in 'mixed step'"
    assert wording.where(None) == ""


def test_times() -> None:
    told = {0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 99.4: "99 s", 99.6: "1 min 40 s"}
    assert {value: wording.seconds(value) for value in told} == told
    assert wording.seconds(7384) == "2 h 3 min"


def test_groups_keep_their_order() -> None:
    checks = [reports.check(name) for name in ("b/1", "a/1", "b/2", "alone")]
    found = wording.groups(checks)
    assert [(group.name, len(group.checks)) for group in found] == [
        ("b", 2),
        ("a", 1),
        ("alone", 1),
    ]
    assert [wording.short_id(check) for check in checks] == ["1", "1", "2", "alone"]
    checks[2].measures = [Measure(name="bad", value=2.0, gate=1.0)]
    assert found[0].worst == (checks[2], checks[2].measures[0])
    assert (
        wording.Group("none", [Check(id="x", invariant="", what="", status=Status.PASSED)]).worst
        is None
    )
