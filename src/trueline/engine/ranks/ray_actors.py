"""The other ranks as Ray actors: Ray places and starts them, and says when one is lost. They run
what a rank's process runs, and exchange by torch.distributed as those do, never through Ray."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from trueline.config import EngineConfig
from trueline.device import gpu_number
from trueline.engine.ranks.orders import WorkerStart
from trueline.engine.ranks.processes import SECONDS_TO_END, Alarm
from trueline.errors import UsageError
from trueline.parallel.group import Place, RankFailed

PINNED = 0.001
"""Of a node's own resource, which says only that a bundle is to be there."""


class RankActor:
    """A rank's process, as Ray runs it."""

    def where(self) -> tuple[str, int]:
        """The node's id, and the process's."""
        return import_ray().get_runtime_context().get_node_id(), os.getpid()

    def serve(self, start: bytes) -> int:
        """Until rank 0 says that it ends. Returns the exit code."""
        from trueline.engine.ranks.worker import run

        return run(msgspec.json.decode(start, type=WorkerStart))


def import_ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError(
            "distributed_executor_backend = 'ray' needs ray, which is not installed: "
            "pip install 'trueline[ray]'"
        ) from None
    return ray


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """`ray.init` sets a handler of its own; what a signal means is the program's to decide."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class RayCluster:
    """A placement group with a bundle for every rank, in the cluster that runs or, where none does,
    in one of this process's own. Rank 0's bundle is on this node; nothing of Ray's runs in it."""

    def __init__(self, config: EngineConfig) -> None:
        self.ray = import_ray()
        self._group: Any = None
        with _sigterm_kept():
            self._is_ours = self._connect(config)
        try:
            self.address = str(self.ray.util.get_node_ip_address())
            self.on_gpus = config.device == "cuda" or (
                config.device == "auto" and self.ray.cluster_resources().get("GPU", 0) > 0
            )
            self._reserve(config.tensor_parallel_size, config.init_timeout)
        except BaseException:
            self.close()
            raise

    def _connect(self, config: EngineConfig) -> bool:
        """Whether this engine has done so, and so disconnects; a cluster of its own ends then."""
        ray = self.ray
        if ray.is_initialized():
            return False
        # "auto" also finds a cluster that another program has started for itself: replicas must
        # find one, an engine alone need not
        address = "auto" if config.data_parallel_size > 1 else None
        try:
            ray.init(address=address, include_dashboard=False, logging_level="WARNING")
        except ConnectionError as error:
            raise UsageError(
                f"distributed_executor_backend = 'ray': no cluster was found: {error}; start one "
                "with `ray start --head`, which replicas (data_parallel_size) share"
            ) from None
        return True

    def _reserve(self, size: int, seconds: float) -> None:
        from ray.util.placement_group import placement_group

        kind = "GPU" if self.on_gpus else "CPU"
        bundles = [{kind: 1.0} for _ in range(size)]
        bundles[0][f"node:{self.address}"] = PINNED
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(seconds):
            has, free = self.ray.cluster_resources(), self.ray.available_resources()
            raise RankFailed(
                f"Ray did not place {size} ranks within {seconds:g} s (init_timeout): they want "
                f"{size} × 1 {kind}, one of them on this node ({self.address}); the cluster has "
                f"{has.get(kind, 0):g} {kind}, of which {free.get(kind, 0):g} are free"
            )

    def _options(self, bundle: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": 0 if self.on_gpus else 1,
            "num_gpus": 1 if self.on_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        }

    def start(self, rank: int) -> Any:
        return self.ray.remote(RankActor).options(max_restarts=0, **self._options(rank)).remote()

    def own_gpu(self) -> int:
        """Of rank 0, which Ray keeps free for it, as PyTorch numbers it here."""
        asked = self.ray.remote(_first_gpu).options(**self._options(0)).remote()
        return gpu_number(str(self.ray.get(asked)))

    def close(self) -> None:
        if not self.ray.is_initialized():
            return
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        if self._is_ours:
            self.ray.shutdown()


def _first_gpu() -> str:
    return str(import_ray().get_gpu_ids()[0])


class RayRanks:
    """`Workers`: ranks from 1 up, each an actor in its bundle."""

    def __init__(self, config: EngineConfig) -> None:
        self.cluster = cluster = RayCluster(config)
        self.alarm = Alarm()
        self._deaths: list[tuple[int, int | None]] = []
        self._death = threading.Event()
        self._actors = {rank: cluster.start(rank) for rank in range(1, config.tensor_parallel_size)}
        self._serving: dict[int, Any] = {}
        self._end = weakref.finalize(self, _kill, cluster, self._actors, self._serving)
        try:
            self._where = {
                rank: self._locate(rank, config.init_timeout) for rank in sorted(self._actors)
            }
        except BaseException:
            self.close()
            raise

    def _locate(self, rank: int, seconds: float) -> tuple[str, int]:
        ray = self.cluster.ray
        try:
            node, pid = ray.get(self._actors[rank].where.remote(), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise RankFailed(
                f"rank {rank}: its Ray actor did not start within {seconds:g} s (init_timeout)"
            ) from None
        except ray.exceptions.RayError as error:
            raise RankFailed(f"rank {rank}: its Ray actor cannot run: {error}") from None
        return str(node), int(pid)

    def places(self) -> list[Place]:
        """By rank. Ray shows an actor no GPU but its own; CPUs are shared by those of a node."""
        size = 1 + len(self._actors)
        if self.cluster.on_gpus:
            gpus = [self.cluster.own_gpu()] + [0] * len(self._actors)
            return [
                Place(rank=rank, size=size, local_rank=gpu, local_size=1)
                for rank, gpu in enumerate(gpus)
            ]
        own = self.cluster.ray.get_runtime_context().get_node_id()
        nodes = [own, *(self._where[rank][0] for rank in range(1, size))]
        return [
            Place(
                rank=rank,
                size=size,
                local_rank=Counter(nodes[:rank])[node],
                local_size=Counter(nodes)[node],
            )
            for rank, node in enumerate(nodes)
        ]

    def serve(self, model: Path, config: EngineConfig, places: list[Place], port: int) -> None:
        for place in places[1:]:
            start = WorkerStart(
                model=str(model.resolve()),
                config=config,
                rank=place.rank,
                local_rank=place.local_rank,
                local_size=place.local_size,
                address=self.cluster.address,
                port=port,
            )
            serving = self._actors[place.rank].serve.remote(msgspec.json.encode(start))
            self._serving[place.rank] = serving
            told = place.rank, self._deaths, self._death, self.alarm
            serving.future().add_done_callback(_reporter(*told))

    # -- Workers -------------------------------------------------------------------------

    def deaths(self, seconds: float = 0.0) -> list[tuple[int, int | None]]:
        self._death.wait(seconds)
        return list(self._deaths)

    def pids(self) -> dict[int, int]:
        return {rank: pid for rank, (_, pid) in self._where.items()}

    def kill(self) -> None:
        self._end()

    def close(self) -> None:
        self.kill()
        self.alarm.close()

    def wait(self) -> None:
        _wait(self.cluster.ray, self._serving)
        self.kill()


def _reporter(
    rank: int, deaths: list[tuple[int, int | None]], death: threading.Event, alarm: Alarm
) -> Callable[[Any], None]:
    def report(served: Any) -> None:
        """Ray does not say how an actor's process has ended."""
        deaths.append((rank, None if served.exception() else served.result()))
        death.set()
        alarm.ring()

    return report


def _wait(ray: Any, serving: dict[int, Any]) -> None:
    if serving:
        ray.wait(list(serving.values()), num_returns=len(serving), timeout=SECONDS_TO_END)


def _kill(cluster: RayCluster, actors: dict[int, Any], serving: dict[int, Any]) -> None:
    ray = cluster.ray
    if ray.is_initialized():
        for actor in actors.values():
            ray.kill(actor)
        with suppress(ray.exceptions.RayError):
            _wait(ray, serving)
    cluster.close()
