"""What the tests cost: CPU seconds of each, with its child processes, so that a busy machine does
not change the figures. Printed at the end beside each folder's budget; no outcome depends on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUDGETS: dict[str, int] = {}
"""CPU seconds of `make test` by folder, on two AVX2 cores; their sum is below 20 minutes."""
SLOWEST = 20
COST = "cpu_seconds"


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Models and servers that fixtures make belong to the test that first asks for them."""
    start = _cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((COST, _cpu_seconds() - start))


def costs(reports: list[pytest.TestReport]) -> Counter[str]:
    """CPU seconds by test."""
    found: Counter[str] = Counter()
    for report in reports:
        if report.when == "teardown":  # once a test: it has all properties by then
            found[report.nodeid] += sum(v for name, v in report.user_properties if name == COST)
    return found


def by_folder(found: Counter[str]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for test, seconds in found.items():
        totals[str(Path(test.split("::")[0]).parent.relative_to("tests"))] += seconds
    return totals


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each]
    found = costs([report for report in reports if isinstance(report, pytest.TestReport)])
    if sum(found.values()) < 10:
        return
    terminalreporter.section(f"CPU seconds: {sum(found.values()):.0f}, the {SLOWEST} slowest tests")
    for test, seconds in found.most_common(SLOWEST):
        terminalreporter.line(f"{seconds:8.1f}  {test}")
    for folder, seconds in by_folder(found).most_common():
        budget = BUDGETS.get(folder)
        over = " OVER" if budget and seconds > budget else ""
        terminalreporter.line(f"{seconds:8.1f}  {folder}/, budget {budget}{over}")
