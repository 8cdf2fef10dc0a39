"""How ranks find each other, and what they agree on before they compute."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

from trueline.errors import EngineBroken, UsageError
from trueline.parallel.distributed import (
    Control,
    Distributed,
    Heartbeat,
    Journal,
    ranks_text,
    who_is_behind,
)
from trueline.parallel.process_group import FOREVER, Backend, ProcessGroup, Store, c10d
from trueline.utils.environment import launcher_settings

LOCAL = "127.0.0.1"
SECONDS_BETWEEN_LOOKS = 0.02
FAILURE = "failure"
"""Key of the store: why the first rank that failed has."""
LOOK = "look"
"""Key of the store, set when rank 0 is to look for a failure, or has ended."""
END, GIVEN_UP = "end", "given up"
"""Key of the store, set when rank 0 has given the ranks up, or closed the engine."""
_MADE = count()


class RankFailed(EngineBroken):
    """A rank is gone, does not answer, or does not fit the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a rank among all, and among those of its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def open_store(
    place: Place, address: str, port: int, seconds: float, *, hosted: bool = False
) -> Store:
    """The store at `address`, which rank 0 opens unless somebody else does (`hosted`). Port 0: a
    free one."""
    try:
        return c10d.TCPStore(
            address,
            port,
            None,
            place.rank == 0 and not hosted,
            timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (c10d.DistError, RuntimeError, ValueError) as error:
        words = str(error).splitlines()[0]
        if place.rank == 0 and not hosted:
            raise UsageError(
                f"master_addr = {address!r}, master_port = {port}: rank 0 cannot listen there: "
                f"{words}"
            ) from None
        raise RankFailed(
            f"rank {place.rank}: rank 0 was not found at {address}:{port} within {seconds:g} s "
            f"(init_timeout): {words}"
        ) from None


class RankGroup:
    """One rank's connection to all others."""

    def __init__(
        self,
        store: Store,
        place: Place,
        backend: Backend,
        *,
        master: str = LOCAL,
        seconds: float = 600.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when all have come. `alive` raises where one that should come has ended."""
        self.place, self.backend = place, backend
        self.store = store
        self._seconds = seconds
        self._meet(alive)
        self._address = _own_address(master)
        self.aborted = False
        self._groups: list[ProcessGroup] = []
        self._waits: list[threading.Thread] = []
        self.control = self.messages("control")
        self.journal = Journal()
        self.collective = Distributed(self._group("exchange", backend), backend, self.journal)
        self.heartbeat = Heartbeat(store, place.rank, self.journal)

    def messages(self, name: str) -> Control:
        """A way of its own for messages: every rank asks for it, and uses it in the same order."""
        return Control(self._group(name, "gloo"))

    def _group(self, name: str, backend: Backend) -> ProcessGroup:
        place = self.place
        made = ProcessGroup(self.store, name, place.rank, place.size, backend, self._address)
        self._groups.append(made)
        return made

    def _meet(self, alive: Callable[[], None]) -> None:
        """Rank 0 looks who is there; the others wait for its word."""
        me, size = self.place.rank, self.place.size
        self.store.set(f"here/{me}", socket.gethostname())
        if me != 0:
            self._get("all", f"rank {me}: rank 0 did not say that all ranks are there")
            return
        end = time.monotonic() + self._seconds
        missing = list(range(1, size))
        while missing := [rank for rank in missing if not self.store.check([f"here/{rank}"])]:
            alive()
            if time.monotonic() > end:
                there = [str(rank) for rank in range(size) if rank not in missing]
                raise RankFailed(
                    f"{ranks_text(missing)} of {size} did not come within {self._seconds:g} s "
                    f"(init_timeout); here: {', '.join(there)}"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self.store.set("all", "here")

    def agree(self, facts: Mapping[str, str]) -> None:
        """That these are the same on every rank; RankFailed names what differs."""
        me = self.place.rank
        self.store.set(f"facts/{me}", json.dumps(dict(facts)))
        first = json.loads(self._get("facts/0", f"rank {me}: rank 0 did not say what it runs"))
        for name, mine in facts.items():
            if first.get(name) != mine:
                raise RankFailed(
                    f"rank {me} and rank 0 differ in {name}: {mine} and {first.get(name)}; "
                    "all ranks must be the same"
                )

    def table(self, row: list[str]) -> list[list[str]]:
        """Every rank's row, by rank."""
        return [json.loads(each) for each in self.control.share(json.dumps(row))]

    def _get(self, key: str, otherwise: str) -> str:
        try:
            self.store.wait([key], timedelta(seconds=self._seconds))
        except (c10d.DistError, RuntimeError):
            raise RankFailed(f"{otherwise} within {self._seconds:g} s (init_timeout)") from None
        return str(self.store.get(key).decode())

    # -- failures ------------------------------------------------------------------------

    def report(self, words: str) -> bool:
        """Tell rank 0 why this rank ends. Whether it is the first."""
        return report(self.store, self.place.rank, words)

    def reported(self) -> str | None:
        return self.store.get(FAILURE).decode() if self.store.check([FAILURE]) else None

    def when_reported(self, act: Callable[[], None]) -> None:
        """Calls `act` in a thread of its own when a rank has reported why it ends."""
        store = self.store.clone()  # a connection in which somebody waits is of no use to others

        def wait() -> None:
            store.wait([LOOK], FOREVER)
            if store.check([FAILURE]):
                act()

        self._waits.append(threading.Thread(target=wait, name="trueline-failures", daemon=True))
        self._waits[-1].start()

    def behind(self) -> str:
        return who_is_behind(self.store, self.place.size, self.journal)

    def abort(self) -> None:
        """Nobody waits in an exchange any more: each that does gets an error."""
        self.aborted = True
        if self.place.rank == 0:
            self.store.set(END, GIVEN_UP)
        for group in self._groups:
            group.abort()

    def close(self) -> None:
        """Closes its ports too."""
        if self.store is None:
            return
        self.heartbeat.stop()
        if self.place.rank == 0:
            self.store.compare_set(END, "", "closed")
            self.store.set(LOOK, "")
        for thread in self._waits:
            thread.join()
        self._waits.clear()
        for group in self._groups:
            group.close()
        self.store = None  # that of rank 0 listens until nobody knows it


def report(store: Store, rank: int, words: str) -> bool:
    """For rank 0: why a rank has ended. Whether it is the first."""
    try:
        if store.add("failures", 1) > 1:
            return False
        store.set(FAILURE, f"rank {rank}: {words}")
        store.set(LOOK, "")
    except (c10d.DistError, RuntimeError):  # rank 0 is gone
        return False
    return True


def wait_for_end(store: Store) -> bool:
    """Whether rank 0 has given the ranks up; else it has closed the engine, or is gone."""
    try:
        store.wait([END], FOREVER)
        return bool(store.get(END).decode() == GIVEN_UP)
    except (c10d.DistError, RuntimeError):
        return False


def _own_address(master: str) -> str:
    """Of this machine, in the network in which rank 0 is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing
        return str(probe.getsockname()[0])


def launched_place() -> Place:
    """As torchrun says."""
    given = launcher_settings()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in given]
    if missing:
        raise UsageError(
            "distributed_executor_backend = 'external_launcher': the environment lacks "
            f"{', '.join(missing)}; start the program with torchrun"
        )
    rank, size, local_rank, local_size = (int(given[name]) for name in names)
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def join_launched(place: Place, backend: Backend, seconds: float) -> RankGroup:
    """The ranks that torchrun has started, by its own store."""
    given = launcher_settings()
    address, port = given["MASTER_ADDR"], int(given["MASTER_PORT"])
    hosted = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_store(place, address, port, seconds, hosted=hosted)
    # a program may make several engines, in the same order on every rank
    own = c10d.PrefixStore(f"trueline/{next(_MADE)}", store)
    return RankGroup(own, place, backend, master=address, seconds=seconds)
