"""Ranks as processes on this CPU, beside one process with as many threads: decode, prefill, and
what one exchange costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from trueline.bench.workload import Workload, bench_engine, measure, timed
from trueline.errors import EngineBroken
from trueline.llm import LLMEngine
from trueline.parallel.distributed import Control, Distributed
from trueline.parallel.group import join_launched, launched_place
from trueline.utils.json_types import JSON

WORKS = {
    "decode, 1 request": Workload(1, 32, 33),
    "decode, 8 requests": Workload(8, 32, 33),
    "prefill, 512 tokens": Workload(1, 512, 1),
}
TARGET = 0.85
"""Of one process's rate, by as many processes of one thread as it has threads."""
EXCHANGES = 200
MESSAGE = 4096
"""Bytes of a step's message: eight requests with a thousand tokens each."""


def compare(model: str, size: int, rounds: int) -> list[JSON]:
    """The two in turn, so that a busy machine slows both."""
    one = bench_engine(model, device="cpu")
    several = bench_engine(model, device="cpu", tensor_parallel_size=size)
    rows: list[JSON] = []
    try:
        for what, work in WORKS.items():
            rates = [(_rate(one, work), _rate(several, work)) for _ in range(rounds)]
            ratio = median(after / before for before, after in rates)
            first, second = (median(each) for each in zip(*rates, strict=True))
            row: JSON = {"what": what, "one": first, "ranks": second, "ratio": ratio}
            rows.append(row | {"met": ratio >= TARGET})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        one.core.close()
        several.core.close()
    return rows


def _rate(engine: LLMEngine, work: Workload) -> float:
    """Tokens a second."""
    if work.output_len > 1:
        return measure(engine, work).decode_tokens_per_s
    return timed(engine, work.prompts(engine.spec.vocab.total), 1).prefill_tokens_per_s


def exchange_costs(size: int, hidden: int) -> list[JSON]:
    """Microseconds of one, among processes of this machine that do nothing else."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(size), "-m", __name__, str(hidden)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EngineBroken(f"measuring exchanges failed: {done.stderr[-1000:]}")
    rows: list[JSON] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main(hidden: int) -> None:
    """One rank of those that torchrun starts."""
    torch.set_num_threads(1)
    group = join_launched(launched_place(), "gloo", 60.0)
    control, rank = group.control, group.place.rank
    rows = [_cost("broadcast of a step's message", MESSAGE, _message(control, rank))]
    rows += [
        _cost(
            f"all_reduce of {each.shape[0]} x {hidden}", each.nbytes, _sum(group.collective, each)
        )
        for each in (torch.zeros(tokens, hidden) for tokens in (1, 8, 64))
    ]
    group.close()
    if group.place.rank == 0:
        print(json.dumps(rows), flush=True)


def _message(control: Control, rank: int) -> Callable[[], object]:
    data = bytes(MESSAGE)
    return (lambda: control.tell(data)) if rank == 0 else control.hear


def _sum(collective: Distributed, x: torch.Tensor) -> Callable[[], object]:
    return lambda: collective.all_reduce(x)


def _cost(what: str, num_bytes: int, exchange: Callable[[], object]) -> JSON:
    times = []
    for _ in range(EXCHANGES):
        start = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - start)
    return {"what": what, "bytes": num_bytes, "us": 1e6 * median(times)}


if __name__ == "__main__":
    main(int(sys.argv[1]))
