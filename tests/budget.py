"""What the tests cost: CPU seconds of each, with its child processes, so that a busy machine does
not change the figures. Printed at the end beside each area's budget; no outcome depends on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from fnmatch import fnmatch
from pathlib import Path

import pytest

AREAS = {
    "spec": (40, "readers spec_* published fuzz tiny rope_* params plugins"),
    "reference": (45, "reference_* ling sparse indexer"),
    "ops": (
        105,
        "ops bounds conformance edges far_* index_* lightning min_p native pool sampling* scratch "
        "sparse_ops",
    ),
    "triton": (205, "triton_* work_list machine_code hopper warmup gpu bench_gpu"),
    "engine": (
        170,
        "engine blocks scheduler* states hybrid sparse_engine memory cache_* captured_* choices* "
        "ends failures graphs latent_* layer_* llm reported pauses sizes",
    ),
    "verify": (105, "faults docs architecture mutants weight*"),
    "text": (20, "text chat answer* stop template_*"),
    "server": (
        120,
        "server* serve_* engine_process protocol frames limits clients cli bench_server "
        "bench_neighbours figures run",
    ),
}
"""By area: CPU seconds that `make test` may take on two AVX2 cores, and the tests' files. The sum
leaves room for cores that are slower: two of them have 1,200 in 10 minutes."""
SLOWEST = 20
COST = "cpu_seconds"


def area(test: str) -> str:
    """Of a test's file, by its name."""
    name = Path(test.split("::")[0]).stem.removeprefix("test_")
    (found,) = [
        area
        for area, (_, patterns) in AREAS.items()
        if any(fnmatch(name, pattern) for pattern in patterns.split())
    ]
    return found


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
        totals[area(test)] += seconds
    for name, seconds in totals.most_common():
        budget, _ = AREAS[name]
        over = " OVER" if seconds > budget else ""
        terminalreporter.line(f"{seconds:8.1f}  {name}, budget {budget}{over}")
