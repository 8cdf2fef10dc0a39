"""A server whose engine is several processes: what its clients hear when one of them is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from servers import SECONDS, Served, serving

NUM_STREAMS = 32
FLAGS = ("--tensor-parallel-size", "2", "--batch-invariant")


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("deepseek_v3", keys={"intermediate_size": 96, "moe_intermediate_size": 24})


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # of a thread that has just ended
            found += map(int, task.read_text().split())
    return found


def rank_pid(served: Served) -> int:
    """Of rank 1."""
    (pid,) = children(served.engine_pid())
    return pid


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def text(served: Served) -> str:
    client = served.client()
    found = client.completions.create(
        model="deepseek_v3", prompt="true to the", temperature=0, max_tokens=8
    )
    return found.choices[0].text


def heard_when_killed(served: Served) -> list[str]:
    """What each of many streams ends with when a rank is killed after all have begun."""
    begun = threading.Barrier(NUM_STREAMS + 1, timeout=SECONDS)
    client = served.client()

    def listen(number: int) -> str:
        stream = client.completions.create(
            model="deepseek_v3", prompt=f"x{number}", max_tokens=8000, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        begun.wait()
        try:
            for _ in stream:
                pass
        except openai.APIError as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        heard = [pool.submit(listen, number) for number in range(NUM_STREAMS)]
        begun.wait()
        os.kill(rank_pid(served), signal.SIGKILL)
        return [each.result(SECONDS) for each in heard]


def check_heard(heard: list[str]) -> None:
    assert len(heard) == NUM_STREAMS
    assert {("rank 1 was killed by SIGKILL" in each) for each in heard} == {True}, heard


def test_a_lost_rank_ends_the_server(model: Path) -> None:
    with serving(model, *FLAGS) as served:
        pids = [served.engine_pid(), rank_pid(served)]
        check_heard(heard_when_killed(served))
        assert served.ended() == 1
        eventually(lambda: not any(map(is_alive, pids)))
        log = served.rest_of_log()
    assert "engine lost" in log
    assert "rank 1 was killed by SIGKILL" in log


@pytest.mark.slow
def test_a_lost_rank_is_started_again(model: Path) -> None:
    """Also one that is lost while nothing runs; and a regular end leaves nobody."""
    with serving(model, *FLAGS, "--on-engine-death", "restart") as served:
        right = text(served)
        check_heard(heard_when_killed(served))
        eventually(lambda: served.get("/health/ready").status_code == 200)
        assert text(served) == right
        pids = [served.engine_pid(), rank_pid(served)]
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)))
        eventually(lambda: served.get("/health/ready").status_code == 200)
        assert text(served) == right
        pids = [served.engine_pid(), rank_pid(served)]
        served.signal(signal.SIGTERM)
        assert served.ended() == 0
        eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_no_rank_outlives_a_killed_server(model: Path) -> None:
    with serving(model, *FLAGS) as served:
        pids = [served.engine_pid(), rank_pid(served)]
        served.signal(signal.SIGKILL)
        served.ended()
        eventually(lambda: not any(map(is_alive, pids)))
