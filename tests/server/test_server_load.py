"""The server on two cores with 200 clients, of whom many behave badly: every answer is right, none
is lost, nothing is left behind, and large bodies do not hold up steps."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from load_clients import LoadClients, Question
from servers import Served, serving
from trueline import LLM, SamplingParams

pytestmark = pytest.mark.slow

Tiny = Callable[..., Path]
LIMIT = 3_000_000
# answers that do not depend on who else runs; too few blocks for all who have a seat
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 120,
    "batch_invariant": True,
}
FLAGS = (
    *("--max-model-len", "512", "--max-num-seqs", "64", "--num-gpu-blocks-override", "120"),
    *("--batch-invariant", "--max-num-queued", "200", "--max-body-bytes", str(LIMIT)),
)
MANNERS = {"stream": 50, "slow": 12, "whole": 10, "leaves": 12, "half": 4, "large": 2, "broken": 6,
           "megabyte": 1}  # fmt: skip
GROWTH = 40 << 20
"""Bytes that the processes may grow by while they serve: what caches and allocators keep."""


def questions(model: Path) -> list[Question]:
    """Some dozens, with prompts that begin alike and prompts that do not."""
    asked: list[dict[str, Any]] = []
    for i in range(48):
        prompt = "a line that many begin with, and go on from " * (i % 3) + f"number {i}"
        each: dict[str, Any] = {"prompt": prompt, "max_tokens": 8 + i, "temperature": 0.0}
        if i % 2:
            each |= {"temperature": 1.0, "seed": i, "n": 1 + i % 3, "top_p": 0.95}
        if i % 4 == 0:
            each |= {"ignore_eos": True}
        if i % 5 == 0:
            each |= {"stop": ["e", "q"]}
        asked.append(each)
    params = [SamplingParams(**{k: v for k, v in each.items() if k != "prompt"}) for each in asked]
    llm = LLM(model, **OPTIONS)
    found = llm.generate([each["prompt"] for each in asked], params, use_tqdm=False)
    return [
        Question(
            each,
            [copy.text for copy in output.outputs],
            [copy.finish_reason for copy in output.outputs],
            sum(len(copy.token_ids) for copy in output.outputs),
        )
        for each, output in zip(asked, found, strict=True)
    ]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    """With blocks and states."""
    return tiny("bailing_moe_v2_5")


@pytest.fixture(scope="module")
def known(model: Path) -> list[Question]:
    return questions(model)


@pytest.fixture
def served(model: Path) -> Iterator[Served]:
    with serving(model, *FLAGS) as found:
        yield found


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def metric(served: Served, name: str) -> float:
    return served.metric(f"trueline:{name}")


def is_idle(served: Served) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "mamba_usage")
    return all(metric(served, name) == 0 for name in names)


def settle(served: Served) -> None:
    end = time.monotonic() + 20
    while not is_idle(served):
        assert time.monotonic() < end, served.get("/metrics").text
        time.sleep(0.05)


def test_two_hundred_clients(served: Served, known: list[Question]) -> None:
    processes = (served.process.pid, served.engine_pid())
    clients = LoadClients(served.url, known, LIMIT)
    # until caches are there, and every thread has had a large body
    asyncio.run(clients.visit(200, 5, MANNERS))
    asyncio.run(clients.visit(24, 8, {"megabyte": 1, "large": 1}))
    settle(served)
    before = [resident(pid) for pid in processes]
    open_before = [descriptors(pid) for pid in processes]

    asyncio.run(clients.visit(200, 60, MANNERS))
    settle(served)
    print(dict(clients.outcomes))
    assert not clients.failures, clients.failures[:5]
    assert clients.outcomes["stream: right"] > 500
    assert clients.outcomes["slow: right"] > 50
    assert clients.outcomes["leaves: left"] > 100
    assert metric(served, "corrupted_requests_total") == 0
    assert not [line for line in served.get("/metrics").text.splitlines()
                if "http_requests_total" in line and 'status="5' in line]  # fmt: skip
    end = time.monotonic() + 10
    while any(descriptors(pid) > old for pid, old in zip(processes, open_before, strict=True)):
        assert time.monotonic() < end, "files stay open"
        time.sleep(0.1)
    after = [resident(pid) for pid in processes]
    print([(b - a) >> 10 for a, b in zip(before, after, strict=True)], "KiB grown")
    assert all(b - a < GROWTH for a, b in zip(before, after, strict=True))


def steps(served: Served) -> list[tuple[float, float]]:
    """How many steps took up to how many seconds."""
    start = "trueline:engine_step_seconds_bucket{"
    lines = [line for line in served.get("/metrics").text.splitlines() if line.startswith(start)]
    return [(float(line.partition('le="')[2].partition('"')[0]), float(line.rpartition(" ")[2]))
            for line in lines]  # fmt: skip


def p99(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> float:
    """Of the steps between two readings, straight between the ends of its bucket."""
    counts = [
        (0.0, 0.0),
        *((up, new - old) for (up, old), (_, new) in zip(before, after, strict=True)),
    ]
    wanted = 0.99 * counts[-1][1]
    assert counts[-1][1] > 300, "too few steps to tell"
    for (low, below), (up, upto) in pairwise(counts):
        if upto >= wanted:
            return low + (up - low) * (wanted - below) / (upto - below)
    raise AssertionError(counts)


def test_large_bodies_do_not_hold_up_steps(served: Served, known: list[Question]) -> None:
    clients = LoadClients(served.url, known, LIMIT)

    async def both() -> None:
        await asyncio.gather(
            clients.visit(24, 15, {"stream": 1}), clients.visit(4, 15, {"megabyte": 1})
        )

    def ratio() -> float:
        start = steps(served)
        asyncio.run(clients.visit(24, 15, {"stream": 1}))
        middle = steps(served)
        asyncio.run(both())
        alone, loaded = p99(start, middle), p99(middle, steps(served))
        print(f"p99 of a step: {alone * 1e3:.2f} ms alone, {loaded * 1e3:.2f} ms with bodies")
        return loaded / alone

    asyncio.run(clients.visit(24, 3, {"stream": 1, "megabyte": 1}))
    found = ratio()
    if found > 1.5:  # others may have had the cores meanwhile
        found = ratio()
    assert found <= 1.5
    assert not clients.failures, clients.failures[:5]
    assert clients.outcomes["megabyte: 400"] > 20
    print(dict(clients.outcomes))
