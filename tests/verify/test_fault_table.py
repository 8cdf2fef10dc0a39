"""docs/verify-faults.md says what a run of verify makes of every seeded fault."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trueline.verify.checks import NEEDS
from trueline.verify.faults.table import FAULTS
from trueline.verify.suite import table

PAGE = Path(__file__).parents[2] / "docs" / "verify-faults.md"
SAMPLE = 6


def _turn() -> int:
    """Another sample for every commit, the same for every run of one."""
    asked = ["git", "-C", str(PAGE.parent), "rev-parse", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return int(found or "0", 16)


def test_rows_are_those_of_faults_there_are() -> None:
    """In their order."""
    ids = [fault.id for fault in FAULTS]
    missing = [name for name in ids if name not in table.read(PAGE)]
    assert not missing, f"python -m trueline.verify.suite.table {PAGE.name} --only …"
    assert list(table.read(PAGE)) == ids


def test_every_fault_that_a_run_meets_is_caught() -> None:
    not_met = {f"not met: {why}" for why in NEEDS.values()}
    rows = table.read(PAGE)
    assert {row[2] for row in rows.values()} == {"caught", *not_met}
    assert not [f.id for f in FAULTS if f.check not in NEEDS and rows[f.id][2] in not_met]


def test_a_sample_of_rows() -> None:
    """Of those that are cheap: caught before ops are checked alone."""
    rows = table.read(PAGE)
    quick = [fault for fault in FAULTS if rows[fault.id][4] in QUICK]
    start = _turn() % len(quick)
    some = [quick[(start + 61 * i) % len(quick)] for i in range(SAMPLE)]
    assert list(table.differences(some, PAGE)) == []


QUICK = ("start", "preflight", "layers", "definition")


@pytest.mark.slow
def test_all_rows() -> None:
    assert list(table.differences(FAULTS, PAGE)) == []
