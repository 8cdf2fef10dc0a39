"""`trueline report` as a user meets it: files written, exit codes, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import reports
from trueline.verify.report import write

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / f"{name}.json" for name in ("passing", "failing", "huge")}
    for name, file in found.items():
        write(reports.ALL[name](), file)
    return found


def test_show_prints_and_writes(files: dict[str, Path], run: Run, tmp_path: Path) -> None:
    html, junit = tmp_path / "page.html", tmp_path / "junit.xml"
    code, out, err = run("report", "show", files["failing"], "--html", html, "--junit", junit)
    assert (code, err) == (0, ""), "it was shown: whether it passed was the exit code of verify"
    assert out.startswith("FAILED  witness-v3")
    assert "What is wrong" in out
    assert html.read_text().startswith("<!doctype html>")
    assert len(list(ET.parse(junit).iter("failure"))) == 1
    code, quiet, _ = run("report", "show", files["failing"], "--quiet")
    assert code == 0
    assert len(quiet.splitlines()) < len(out.splitlines()) / 3


def test_show_says_what_it_cannot_read_or_write(
    files: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    code, out, err = run("report", "show", tmp_path / "none.json")
    assert (code, out) == (2, "")
    assert "none.json: not readable" in err
    target = tmp_path / "no" / "page.html"
    code, out, err = run("report", "show", files["passing"], "--html", target)
    assert (code, out) == (2, "")
    assert "page.html: not writable" in err


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [("passing", "failing", 1), ("failing", "passing", 0), ("failing", "failing", 0)],
)
def test_diff_ends_with_1_where_something_is_worse(
    a: str, b: str, wanted: int, files: dict[str, Path], run: Run
) -> None:
    code, out, err = run("report", "diff", files[a], files[b])
    assert (code, err) == (wanted, "")
    assert out.startswith("WORSE: 2 checks newly failing" if wanted else "nothing is worse")
    code, out, _ = run("report", "diff", files[a], files[b], "--json")
    assert code == wanted
    found = json.loads(out)
    assert [each["id"] for each in found["failing"]] == (
        ["modes/mixed step", "modes/abort storm"] if wanted else []
    )
    assert bool(found["worse"]) == bool(wanted)


def test_lost_coverage_is_worse(files: dict[str, Path], run: Run, tmp_path: Path) -> None:
    later = reports.passing()
    later.checks.pop()
    later.checks.pop(0)
    write(later, tmp_path / "later.json")
    code, out, _ = run("report", "diff", files["passing"], tmp_path / "later.json")
    assert code == 1
    assert out.startswith("WORSE: 1 check no longer covered\n")
    assert "preflight/facts: passed → absent" in out


def test_diff_refuses_another_model(files: dict[str, Path], run: Run) -> None:
    code, out, err = run("report", "diff", files["passing"], files["huge"])
    assert (code, out) == (2, "")
    assert "not comparable" in err
    assert "layers differ" in err


def test_a_report_is_shown_where_there_is_no_torch(files: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None  # importing it now raises\n"
        "from trueline.cli import main\n"
        f"main(['report', 'show', {str(files['failing'])!r}, '--html', {str(tmp_path / 'p')!r}])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
