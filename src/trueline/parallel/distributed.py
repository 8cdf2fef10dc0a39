"""Exchange among ranks that are processes: torch.distributed, NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from trueline.parallel.collective import Absent
from trueline.parallel.placement import Divided, Partial, Replicated
from trueline.parallel.process_group import Backend, ProcessGroup, Store, c10d


@dataclass(frozen=True, slots=True)
class Entered:
    """A collective that this rank has come to."""

    number: int
    text: str


class Journal:
    """How far this rank has come: what `engine_timeout` reports of a rank that others wait for."""

    def __init__(self) -> None:
        self.step = 0
        self.last = Entered(0, "start")

    def next_step(self) -> None:
        """In the thread that computes it."""
        self.step += 1

    def enter(self, op: str, x: Tensor) -> None:
        text = f"{described_exchange(op, x)} in step {self.step}"
        self.last = Entered(self.last.number + 1, text)


def described_exchange(op: str, x: Tensor) -> str:
    return f"{op} of {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


GATHERED = 1 << 17
"""Bytes up to which gloo's ranks gather a sum's parts: in half the time of its all-reduce."""


class Distributed:
    """A `Collective` over a process group. What it is given to sum may be overwritten."""

    def __init__(self, group: ProcessGroup, backend: Backend, journal: Journal) -> None:
        self._group, self._backend, self.journal = group, backend, journal
        self.size: int = group.size

    def all_reduce(self, x: Partial) -> Replicated:
        self.journal.enter("all_reduce", x)
        mine = self._here(x.contiguous())
        if self._backend == "gloo" and mine.nbytes <= GATHERED:
            parts = self._gathered(mine)
            return Replicated(parts.view(self.size, *mine.shape).sum(0).to(x.device))
        self._group.c10d.allreduce([mine]).wait()
        return Replicated(mine.to(x.device))

    def all_gather(self, x: Divided, dim: int) -> Replicated:
        self.journal.enter("all_gather", x)
        parts = self._gathered(self._here(x.contiguous()))
        if dim:
            parts = torch.cat(parts.chunk(self.size), dim)
        return Replicated(parts.to(x.device))

    def _gathered(self, mine: Tensor) -> Tensor:
        """Every rank's, one after the other."""
        parts = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        self._group.c10d._allgather_base(parts, mine).wait()
        return parts

    def from_first(self, x: Tensor) -> Replicated:
        self.journal.enter("broadcast", x)
        mine = self._here(x.contiguous())
        self._group.c10d.broadcast([mine], _root()).wait()
        return Replicated(mine.to(x.device))

    def __reduce__(self) -> tuple[type[Absent], tuple[int]]:
        """A copy of the model's layers without data (engine/dry_run.py) exchanges nothing."""
        return Absent, (self.size,)

    def _here(self, x: Tensor) -> Tensor:
        """Where the backend works: gloo exchanges what is on the host."""
        return x.cpu() if self._backend == "gloo" else x


def _root() -> Any:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    return options


class Control:
    """Plain messages and small numbers among the ranks, on the host."""

    FIRST = 1 << 16
    """Bytes of a message that travel at once with its length; the rest follows."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._buffer = torch.zeros(self.FIRST, dtype=torch.uint8)

    def tell(self, data: bytes) -> None:
        """To all others: rank 0 only."""
        payload = torch.frombuffer(
            bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8
        )
        first = payload[: self.FIRST]
        self._buffer[: len(first)] = first
        self._group.c10d.broadcast([self._buffer], _root()).wait()
        if len(payload) > self.FIRST:
            self._group.c10d.broadcast([payload[self.FIRST :].clone()], _root()).wait()

    def hear(self) -> bytes:
        """What rank 0 tells; waits for it."""
        self._group.c10d.broadcast([self._buffer], _root()).wait()
        count = 8 + int.from_bytes(self._buffer[:8].numpy().tobytes(), "little")
        data = self._buffer[8:count].numpy().tobytes()
        if count > self.FIRST:
            rest = torch.empty(count - self.FIRST, dtype=torch.uint8)
            self._group.c10d.broadcast([rest], _root()).wait()
            data += rest.numpy().tobytes()
        return data

    def smallest(self, values: list[int]) -> list[int]:
        """Of every rank's numbers."""
        found = torch.tensor(values, dtype=torch.int64)
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        self._group.c10d.allreduce([found], options).wait()
        return [int(value) for value in found]

    def share(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        mine = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        longest = -self.smallest([-len(mine)])[0]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        parts = padded.new_empty(self._group.size * longest)
        self._group.c10d._allgather_base(parts, padded).wait()
        texts = (part.numpy().tobytes() for part in parts.chunk(self._group.size))
        return [each.rstrip(b"\0").decode() for each in texts]


class Heartbeat:
    """Writes a rank's journal into the store, again and again, so that others can say where it is,
    and whether it runs at all."""

    SECONDS = 0.5

    def __init__(self, store: Store, rank: int, journal: Journal) -> None:
        self._store, self._rank, self._journal = store, rank, journal
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trueline-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for beat in count(1):
            last = self._journal.last
            try:
                self._store.set(f"at/{self._rank}", f"{beat} {last.number} {last.text}")
            except RuntimeError:  # rank 0 is gone, and with it the store
                return
            if self._stopped.wait(self.SECONDS):
                return

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._store = None


def who_is_behind(store: Store, size: int, journal: Journal) -> str:
    """In words, from what the heartbeats wrote: which rank others wait for, and where it is."""
    before = [_last_beat(store, rank) for rank in range(size)]
    time.sleep(3 * Heartbeat.SECONDS)  # what they entered last is written by then
    after = [_last_beat(store, rank) for rank in range(size)]
    silent = [rank for rank in range(size) if before[rank][0] == after[rank][0]]
    at = [journal.last, *(entered for _, entered in after[1:])]
    first = min(entered.number for entered in at)
    last = max(at, key=lambda entered: entered.number)
    if first == last.number:
        words = f"all ranks have come to exchange {last.number} ({last.text})"
    else:
        behind = [rank for rank, entered in enumerate(at) if entered.number == first]
        words = (
            f"{ranks_text(behind)} did not come to exchange {last.number} ({last.text}), where "
            f"others wait; last seen at {first} ({at[behind[0]].text})"
        )
    if silent:
        words += f"; silent (stopped, or on a machine that is not reached): {ranks_text(silent)}"
    return words


def _last_beat(store: Store, rank: int) -> tuple[int, Entered]:
    if not store.check([f"at/{rank}"]):
        return 0, Entered(0, "start")
    beat, number, text = store.get(f"at/{rank}").decode().split(" ", 2)
    return int(beat), Entered(int(number), text)


def ranks_text(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
