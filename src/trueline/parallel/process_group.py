"""Process groups of torch.distributed that can be ended while somebody waits in them."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch.distributed

Backend = Literal["gloo", "nccl"]

c10d: Any = torch.distributed
"""Its stubs lack the classes of stores and process groups."""
Store = Any

FOREVER = timedelta(days=365)
"""Of collectives: who waits too long is found by `engine_timeout`, which knows more."""


class ProcessGroup:
    """Made directly, not through `init_process_group`: a program that has a default group of its
    own, as one under torchrun may, keeps it."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, backend: Backend, address: str
    ) -> None:
        """Returns when all ranks are connected. `address`: of this machine, as the others reach
        it."""
        self.size = size
        self._backend, self._aborted = backend, False
        self._connections: list[socket.socket] = []
        prefixed = c10d.PrefixStore(name, store)
        if backend == "nccl":
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = FOREVER
            self.c10d = c10d.ProcessGroupNCCL(prefixed, rank, size, nccl)
            return

        def make() -> Any:
            gloo = c10d.ProcessGroupGloo._Options()
            gloo._timeout = FOREVER
            gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
            return c10d.ProcessGroupGloo(prefixed, rank, size, gloo)

        self.c10d, self._connections = _with_connections(make, prefixed, rank, size)

    def abort(self) -> None:
        """Whoever waits in it gets an error, on this rank and on all others."""
        self._aborted = True
        self.c10d.abort()  # of gloo: does nothing
        for connection in self._connections:
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.c10d is None:
            return
        if self._backend == "nccl" and not self._aborted:
            self.c10d.shutdown()
        else:
            self.abort()
        self.c10d = None  # its destructor ends threads and closes ports
        for connection in self._connections:
            connection.close()
        self._connections = []


def _with_connections(
    make: Callable[[], Any], store: Store, rank: int, size: int
) -> tuple[Any, list[socket.socket]]:
    """A gloo group, and copies of its sockets: a thread that waits in gloo wakes only when its
    connection ends. Known by the ports that the ranks listen on; other threads may have opened
    sockets meanwhile."""
    before = _open_sockets().keys()
    group = make()
    found = [_copied(fd) for node, fd in _open_sockets().items() if node not in before]
    opened = [each for each in found if each is not None]
    mine = [each.getsockname()[:2] for each in opened if _listens(each)]
    store.set(f"listens/{rank}", json.dumps(mine))
    ports = {
        tuple(name) for other in range(size) for name in json.loads(store.get(f"listens/{other}"))
    }
    kept = [each for each in opened if not _listens(each) and _ends(each) & ports]
    for each in opened:
        if each not in kept:
            each.close()
    return group, kept


def _open_sockets() -> dict[int, int]:
    """Descriptors, by what they refer to."""
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = int(name)
    return found


def _copied(descriptor: int) -> socket.socket | None:
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # closed meanwhile
        return None
    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
        return copy
    copy.close()
    return None


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _ends(each: socket.socket) -> set[tuple[str, int]]:
    try:
        return {each.getsockname()[:2], each.getpeername()[:2]}
    except OSError:  # not connected
        return set()
