"""The engines behind one server: one, or several independent replicas of the model. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from trueline.config import EngineConfig
from trueline.engine.messages import CoreRequest
from trueline.server.process.client import EngineClient, State
from trueline.server.process.load_balancer import LoadBalancer
from trueline.server.process.messages import Ready
from trueline.server.process.streams import EngineDead, Stream


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """Of each engine that one server starts: all replicas, or the one that is asked for."""
    size, rank = config.data_parallel_size, config.data_parallel_rank
    if size == 1 or rank is not None:
        return [config]
    return [replace(config, data_parallel_rank=each) for each in range(size)]


class Replicas:
    """What a client's `on_death` says holds for each replica: "exit" leaves one that has died where
    it is, "restart" starts it again, and the others serve meanwhile. `died` comes when none is
    left. `on_lost` is told of each that will not come back while others are left."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        on_lost: Callable[[int, str], None] = lambda replica, reason: None,
    ) -> None:
        self.clients = clients
        self.died = asyncio.Event()
        self._on_lost = on_lost
        self._balancer: LoadBalancer | None = None
        self._watchers: list[asyncio.Task[None]] = []

    # -- start and end -----------------------------------------------------------------

    async def start(self) -> Ready:
        """Returns when all have loaded the model. They are given the same, so one that cannot is
        an error."""
        starting = [asyncio.create_task(client.start()) for client in self.clients]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await self.stop(0.0)
            await asyncio.gather(*starting, return_exceptions=True)
            raise
        self._watchers = [
            asyncio.create_task(self._watch(i, client)) for i, client in enumerate(self.clients)
        ]
        return self.ready

    async def _watch(self, replica: int, client: EngineClient) -> None:
        await client.died.wait()
        if all(each.died.is_set() for each in self.clients):
            self.died.set()
        else:
            self._on_lost(replica, client.reason or "")

    async def stop(self, timeout: float) -> None:
        await asyncio.gather(*(client.stop(timeout) for client in self.clients))
        for watcher in self._watchers:
            watcher.cancel()

    def kill(self) -> None:
        for client in self.clients:
            client.kill()

    # -- how they are ------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Of the best."""
        states = {client.state for client in self.clients}
        return next(state for state in ("ready", "loading", "stopped", "dead") if state in states)

    @property
    def reason(self) -> str | None:
        if len(self.clients) == 1:
            return self.clients[0].reason
        return "; ".join(
            f"replica {i} is {client.state}: {client.reason}"
            for i, client in enumerate(self.clients)
            if client.reason is not None
        )

    @property
    def ready(self) -> Ready:
        """Of the one that takes the shortest requests, of those that have loaded."""
        loaded = [client.ready for client in self.clients if hasattr(client, "ready")]
        return min(loaded, key=lambda ready: ready.max_model_len)

    @property
    def num_open(self) -> int:
        return sum(client.num_open for client in self.clients)

    @property
    def max_num_seqs(self) -> int:
        """Seats, those of replicas that are being started included."""
        left = sum(not client.died.is_set() for client in self.clients)
        return self.ready.max_num_seqs * left

    # -- requests ----------------------------------------------------------------------

    def generate(self, requests: Sequence[CoreRequest]) -> Stream:
        """One stream of all, whichever replica each goes to. It fails when one of these does."""
        if len(self.clients) == 1:
            return self.clients[0].generate(requests)
        stream = Stream([request.request_id for request in requests], self._abort)
        chosen: dict[int, list[CoreRequest]] = {}
        for request in requests:
            replica = self._choose(request, chosen)
            if replica is None:
                stream.fail(EngineDead(f"the engine is {self.state}: {self.reason}"))
                return stream
            chosen.setdefault(replica, []).append(request)
            stream.engines[request.request_id] = replica
        for replica, mine in chosen.items():
            self.clients[replica].add(mine, stream)
        return stream

    def _choose(self, request: CoreRequest, chosen: dict[int, list[CoreRequest]]) -> int | None:
        """`chosen`: requests that are about to be added."""
        if self.state != "ready":
            return None
        if self._balancer is None:
            self._balancer = LoadBalancer(len(self.clients), self.ready.block_size)
        loads = [
            client.num_open + len(chosen.get(i, ())) if client.state == "ready" else None
            for i, client in enumerate(self.clients)
        ]
        return self._balancer.choose(request.prompt_token_ids, request.cache_salt, loads)

    def _abort(self, names: list[str]) -> None:
        for client in self.clients:
            client.abort(names)
