"""The threads that share a kernel's work: every item once, whoever comes, whoever does not."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paths import HELPERS
from trueline.device import compiler
from trueline.native import FLAGS, HERE

HARNESS = HELPERS / "pool_harness.cpp"
WHOLE = 1 << 30  # an item that costs so much is a run of its own

AFTER_FORK = """
import ctypes, os, sys
pool = ctypes.CDLL(sys.argv[1])
pool.use_threads(3)
assert pool.meet(3) == 3
child = os.fork()
if child == 0:
    os._exit(0 if pool.meet(3) == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.meet(3) == 3
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = compiler()
    if program is None:
        pytest.skip("no C++ compiler")
    to = tmp_path_factory.mktemp("pool") / "pool.so"
    sources = (str(HERE / "pool.cpp"), str(HARNESS))
    command = [program, *FLAGS, "-O1", f"-I{HERE}", "-shared", *sources, "-o", str(to)]
    subprocess.run(command, check=True)
    return to


@pytest.fixture
def pool(built: Path) -> Any:
    return ctypes.CDLL(str(built))


def times(pool: Any, function: str, total: int, *arguments: int) -> list[int]:
    counts = (ctypes.c_int64 * max(total, 1))()
    getattr(pool, function)(*map(ctypes.c_int64, arguments), counts)
    return list(counts)[:total]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_item_once(pool: Any, threads: int) -> None:
    """Any count, cut into runs of any length: the last run is short, or the only one."""
    pool.use_threads(threads)
    for each in (WHOLE, 32768, 20000, 10923, 6000, 1000, 1, 0):
        for count in (*range(40), 65537):
            assert times(pool, "count_items", count, count, each) == [1] * count, (each, count)


def test_call_after_call(pool: Any) -> None:
    """A thread that comes late to a call must not take from the next what it read of this one."""
    pool.use_threads(5)
    for i in range(3000):
        count = 1 + i % 13
        assert times(pool, "count_items", count, count, (WHOLE, 11000)[i % 2]) == [1] * count


def test_calls_within_a_call(pool: Any) -> None:
    pool.use_threads(3)
    for _ in range(50):
        assert times(pool, "count_nested", 35, 5, 7, WHOLE) == [1] * 35


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_come(pool: Any, threads: int) -> None:
    pool.use_threads(1)
    pool.use_threads(threads)
    for _ in range(3):
        assert pool.meet(threads) == threads


def test_a_caller_beside_another_does_not_wait_for_it(pool: Any) -> None:
    pool.use_threads(2)
    first = threading.Thread(target=pool.wait_at_gate)
    first.start()
    try:
        while pool.at_gate() < 2:  # both threads are held up in the first call
            pass
        assert times(pool, "count_items", 9, 9, WHOLE) == [1] * 9
    finally:
        pool.open_gate()
        first.join()


def test_many_callers_at_once(pool: Any) -> None:
    pool.use_threads(3)
    wrong: list[list[int]] = []

    def call() -> None:
        found = (times(pool, "count_items", 11, 11, WHOLE) for _ in range(300))
        wrong.extend(each for each in found if each != [1] * 11)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_child_of_fork_starts_anew_and_both_end(built: Path) -> None:
    """Sleeping threads do not keep a process from ending."""
    subprocess.run([sys.executable, "-c", AFTER_FORK, str(built)], check=True, timeout=300)
