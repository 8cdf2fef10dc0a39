"""What the tests cost: CPU seconds of each, with its child processes, so that a busy machine does
not change the figures. Printed at the end beside each folder's budget; no outcome depends on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

BUDGETS = {
    "bench": 7,
    "browser": 1,
    "cache": 8,
    "cli": 18,
    "client": 18,
    "engine": 160,
    "evaluate": 6,
    "gpu": 1,
    "grammar": 8,
    "house": 9,
    "layers": 1,
    "models": 11,
    "ops": 58,
    "ops/triton": 76,
    "plan": 4,
    "plugins": 20,
    "reference": 26,
    "server": 100,
    "spec": 1,
    "tasks": 3,
    "text": 14,
    "tiny": 5,
    "utils": 5,
    "verify": 108,
    "weights": 22,
    "witness": 26,
}
"""By folder: CPU seconds that `make test` may take on two AVX2 cores. The sum leaves room for cores
that are slower: two of them have 1,200 in 10 minutes."""
SLOWEST = 20
COST = "cpu_seconds"


def folder(test: str) -> str:
    """Of a test's file, below tests."""
    return str(Path(test.split("::")[0]).parent).removeprefix("tests/")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    start = _cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((COST, _cpu_seconds() - start))


# Models that fixtures make belong to the test that first asks for them; servers, whose seconds are
# known when they have ended, to the last.
pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call


def costs(reports: list[pytest.TestReport]) -> Counter[str]:
    """CPU seconds by test."""
    found: Counter[str] = Counter()
    for report in reports:
        if report.when == "teardown":  # once a test: it has all properties by then
            found[report.nodeid] += sum(v for name, v in report.user_properties if name == COST)
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each]
    found = costs([report for report in reports if isinstance(report, pytest.TestReport)])
    if sum(found.values()) < 10:
        return
    files: Counter[str] = Counter()
    for test, seconds in found.items():
        files[test.split("::")[0]] += seconds
    terminalreporter.section("CPU seconds by file")
    for file, seconds in files.most_common(SLOWEST):
        terminalreporter.line(f"{seconds:8.1f}  {file}")
    terminalreporter.section(f"CPU seconds: {sum(found.values()):.0f}, the {SLOWEST} slowest tests")
    for test, seconds in found.most_common(SLOWEST):
        terminalreporter.line(f"{seconds:8.1f}  {test}")
    totals: Counter[str] = Counter()
    for test, seconds in found.items():
        totals[folder(test)] += seconds
    for name, seconds in totals.most_common():
        budget = BUDGETS[name]
        over = " OVER" if seconds > budget else ""
        terminalreporter.line(f"{seconds:8.1f}  {name}, budget {budget}{over}")
