"""What decode keeps while other programs use the cores: the same requests decode on, while busy
processes on the same cores are alternately stopped and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from statistics import median

from trueline.bench.decoding import decoding, step_seconds
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

# One program with a busy process on each of the cores named; ends with whoever holds its standard
# input. One session, because Linux shares cores among sessions first (autogroup): two sessions
# beside ours would leave us a third, not a half.
BUSY = """
import os, signal, sys
busy = []
for core in sys.argv[1:]:
    busy.append(os.fork())
    while busy[-1] == 0: pass
    os.sched_setaffinity(busy[-1], {int(core)})
print(*busy, flush=True)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""
WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """Decode rates of two phases right after each other."""

    alone: float
    beside: float

    @property
    def ratio(self) -> float:
        return self.beside / self.alone


@dataclass(frozen=True, slots=True)
class Beside:
    batch: int
    neighbours: int
    rounds: list[Round]

    @property
    def alone_tokens_per_s(self) -> float:
        return median(each.alone for each in self.rounds)

    @property
    def beside_tokens_per_s(self) -> float:
        return median(each.beside for each in self.rounds)

    @property
    def ratio(self) -> float:
        return median(each.ratio for each in self.rounds)

    def as_json(self) -> JSON:
        return asdict(self) | {
            "alone_tokens_per_s": self.alone_tokens_per_s,
            "beside_tokens_per_s": self.beside_tokens_per_s,
            "ratio": self.ratio,
        }


class Neighbours:
    """Busy processes, one on each of the first cores that we may use; stopped at first."""

    def __init__(self, group: int, processes: list[int]) -> None:
        self._group, self.processes = group, processes

    @contextmanager
    def at_work(self) -> Iterator[None]:
        os.killpg(self._group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._group, signal.SIGSTOP)


@contextmanager
def start_neighbours(count: int) -> Iterator[Neighbours]:
    cores = sorted(os.sched_getaffinity(0))
    chosen = [str(cores[i % len(cores)]) for i in range(count)]
    program = subprocess.Popen(
        [sys.executable, "-c", BUSY, *chosen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as another user's program is
    )
    try:
        assert program.stdout is not None
        processes = [int(pid) for pid in program.stdout.readline().split()]
        if len(processes) != count:
            raise RuntimeError("the busy processes beside the benchmark did not start")
        os.killpg(program.pid, signal.SIGSTOP)
        yield Neighbours(program.pid, processes)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def measure_beside(
    engine: LLMEngine, batch: int, neighbours: Neighbours, rounds: int, seconds: float
) -> Beside:
    """`batch` requests of 128 tokens decode through `rounds` pairs of phases."""
    made = []
    with decoding(engine, batch):
        for _ in range(rounds):
            alone = _rate(engine, batch, seconds)
            with neighbours.at_work():
                made.append(Round(alone, _rate(engine, batch, seconds)))
    return Beside(batch, len(neighbours.processes), made)


def _rate(engine: LLMEngine, batch: int, seconds: float) -> float:
    """Tokens per second of decode steps; the first ones do not count."""
    return batch / step_seconds(engine, warm=WARM_STEPS, least=1, seconds=seconds)
