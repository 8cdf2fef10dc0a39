"""A report in a terminal: what comes first, narrow windows, texts that look like markup."""

from __future__ import annotations

import io
import re

import pytest
from msgspec.structs import replace
from rich.console import Console

import reports
from trueline.verify.report import Report, Status
from trueline.verify.report.terminal import print_report

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def printed(report: Report, width: int = 80, *, quiet: bool = False, colour: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if colour else None
    console = Console(
        file=file, width=width, highlight=False, force_terminal=colour, color_system=system
    )
    print_report(console, report, quiet=quiet)
    return file.getvalue()


@pytest.mark.parametrize("name", reports.ALL)
def test_it_fits_and_has_no_codes_where_there_is_no_terminal(name: str) -> None:
    for quiet in (False, True):
        text = printed(reports.ALL[name](), quiet=quiet)
        assert "\x1b" not in text
        too_long = [line for line in text.splitlines() if len(line.rstrip()) > 80]
        assert not too_long


def test_only_our_own_codes_reach_a_terminal() -> None:
    text = printed(reports.hostile(), 120, colour=True)
    assert STYLE.search(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", STYLE.sub("", text))


def test_what_looks_like_markup_is_text() -> None:
    report = reports.with_faults()
    name = "[bold]x[/] [link=y]"
    report.checks.append(reports.check(f"[b]/{name}"))
    report.bands = [replace(report.bands[0], what=name)]
    report.faults = [replace(report.faults[0], id=name, caught_by=name, layer=name)]
    assert printed(report, 160).count(name) == 5
    assert "[b]  " in printed(report, 160, quiet=True)


def test_verdict_and_coverage_come_first() -> None:
    lines = printed(reports.failing(), 100).splitlines()
    assert lines[0].startswith(
        "FAILED  witness-v3: 22 passed, 1 failed, 1 ended in an error, 4 not covered"
    )
    assert "first wrong: layer 3, mixer" in lines[2]
    text = "\n".join(lines)
    order = ["Not covered", "no CUDA device here: modes/captured", "Checks", "What is wrong"]
    order += ["This run would have noticed", "It would not have noticed", "Noise bands", "Plan"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_a_failure_has_its_place_evidence_and_replay_file() -> None:
    text = printed(reports.failing(), 120)
    wrong = text[text.index("What is wrong") :]
    assert "layer 3, mixer, attention=native, request 2, position 17, block 5 (decode)" in wrong
    assert re.search(r"worst row +0\.41 \(band 8\.1e-4, accepted 3\.2e-3\)", wrong)
    assert "the same request alone agrees to 7.7e-4" in wrong
    assert "trueline replay 'verify-failures/mixed step.replay'" in wrong


def test_measures_stand_beside_band_and_gate() -> None:
    text = printed(reports.passing(), 120)
    assert re.search(r"  rope +passed +relative error +1\.46e-3 +1\.2e-3 +5\.8e-3 +1\.2 s", text)
    assert re.search(r"  mixer +passed +worst row +1\.46e-3 .* 1$", text, re.M), "its layer"
    failing = printed(reports.failing(), 120)
    assert re.search(r"  mixed step +failed +tokens that differ +3 +0 +0\.2 s +3$", failing, re.M)
    assert re.search(r"  abort storm +error +1\.2 s *$", failing, re.M)
    narrow = printed(reports.passing(), 80)
    assert re.search(r"  rope +passed +relative error +1\.46e-3 +1\.2e-3 +5\.8e-3$", narrow, re.M)


def test_the_short_form_is_short() -> None:
    report = reports.failing()
    lines = printed(report, 200, quiet=True).splitlines()
    groups = len({check.group for check in report.checks})
    assert len(lines) == 3 + groups + len(report.failed)
    assert lines[-1].strip() == "error: modes/abort storm: RuntimeError: block 5 was freed twice"
    assert re.search("modes +10 passed, 1 failed, 1 ended in an error, 4 not covered", lines[-3])


def test_thousands_of_checks_do_not_flood_it() -> None:
    report = reports.huge(checks=20)
    report.checks = report.checks[:308]
    assert len(printed(report).splitlines()) < 170
    for check in report.checks:
        check.status, check.evidence = Status.FAILED, "wrong\n" * 30
    text = " ".join(printed(report).split())
    assert "… and 4 more that failed" in text
    assert "… and 18 more lines" in text
    assert re.search("… and 296 more checks: modes/.*, layer 0/check 7 This run", text)


def test_nothing_to_show() -> None:
    text = printed(reports.empty())
    assert text.startswith("NOTHING PASSED  witness-v3: 1 not covered (smoke; only ranks, 0.1 s)")
    for heading in ("What is wrong", "noticed", "Noise bands", "Known bugs", "Plan"):
        assert heading not in text


def test_faults_that_survived_are_on_top() -> None:
    text = printed(reports.with_faults(), 120)
    assert "1 survived, 30 caught, 1 no effect, 1 not here" in text
    assert re.search(r"─\n+decode-rows-shifted +survived +every check passed", text)
    assert re.search(r"fault-7 +caught +layers/mixer +3", text)
