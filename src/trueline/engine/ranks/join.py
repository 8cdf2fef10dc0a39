"""How the ranks of an engine come together, as its config says."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames

from trueline.config import EngineConfig
from trueline.device import num_gpus, use_gpu
from trueline.engine.ranks.orders import WorkerStart
from trueline.engine.ranks.processes import RankProcesses, Workers, how_it_ended
from trueline.engine.ranks.ray_actors import RayRanks
from trueline.errors import UsageError
from trueline.parallel.group import (
    LOCAL,
    Place,
    RankFailed,
    RankGroup,
    join_launched,
    launched_place,
    open_store,
    report,
    wait_for_end,
)
from trueline.parallel.process_group import Backend, Store

SECONDS_TO_TELL = 5.0
"""For reaching rank 0 once more, to say how a rank has ended."""


def place_of(config: EngineConfig, local_rank: int) -> Place:
    """Every machine has as many ranks."""
    size = config.tensor_parallel_size
    each = size // config.nnodes
    return Place(
        rank=config.node_rank * each + local_rank,
        size=size,
        local_rank=local_rank,
        local_size=each,
    )


def backend_of(config: EngineConfig, place: Place) -> Backend:
    """NCCL where every rank has a GPU of its own, which becomes this process's."""
    found = 0 if config.device == "cpu" else num_gpus()
    if not found:
        return "gloo"
    use_gpu(first_gpu(config, found) + place.local_rank % found)
    if found >= place.local_size:
        return "nccl"
    if config.device == "cuda" and config.enforce_eager:
        return "gloo"  # NCCL wants a GPU for each
    raise UsageError(
        f"{place.local_size} ranks on this machine need as many GPUs, PyTorch sees {found}; "
        "accepted: a smaller tensor_parallel_size, more machines (nnodes), device='cpu', or, to "
        "try ranks that share a GPU, device='cuda' with enforce_eager"
    )


def first_gpu(config: EngineConfig, found: int) -> int:
    """Of those that this replica has for itself."""
    replicas, each = config.data_parallel_size, config.tensor_parallel_size
    if config.backend == "ray":
        return 0  # Ray says which
    if replicas > 1 and found < replicas * each:
        raise UsageError(
            f"data_parallel_size = {replicas}, tensor_parallel_size = {each}: these need "
            f"{replicas * each} GPUs, PyTorch sees {found}; accepted: fewer of either, or "
            "device='cpu'"
        )
    return (config.data_parallel_rank or 0) * each


def join(start: WorkerStart) -> RankGroup:
    """A worker process."""
    config = start.config
    place = Place(
        rank=start.rank,
        size=config.tensor_parallel_size,
        local_rank=start.local_rank,
        local_size=start.local_size,
    )
    store = open_store(place, start.address, start.port, config.init_timeout)
    backend = backend_of(config, place)
    return RankGroup(store, place, backend, master=start.address, seconds=config.init_timeout)


def start_ranks(model: Path, config: EngineConfig) -> tuple[RankGroup, Workers]:
    """Rank 0, after it has started the others."""
    start = _start_actors if config.backend == "ray" else _start_processes
    place, backend, address, store, processes = start(model, config)

    def alive() -> None:
        for rank, code in processes.deaths():
            raise RankFailed(f"rank {rank} {how_it_ended(code)} before it had come")

    try:
        group = RankGroup(
            store, place, backend, master=address, seconds=config.init_timeout, alive=alive
        )
    except BaseException as error:
        processes.close()
        del store  # it listens for as long as somebody knows it
        clear_frames(error.__traceback__)
        raise
    return group, processes


Started = tuple[Place, Backend, str, Store, Workers]
"""Of rank 0: its place, what it exchanges by, and where the store is that the others look for."""


def _start_processes(model: Path, config: EngineConfig) -> Started:
    """Those of this machine. Those of other machines come by themselves (`run_node`)."""
    place = place_of(config, 0)
    backend = backend_of(config, place)
    alone = config.nnodes == 1
    address = LOCAL if alone else config.master_addr
    port = 0 if alone else config.master_port
    store = open_store(place, address, port, config.init_timeout)
    starts = _starts(model, config, address, store.port, range(1, place.local_size))
    return place, backend, address, store, RankProcesses(starts)


def _start_actors(model: Path, config: EngineConfig) -> Started:
    """On the nodes of a Ray cluster, as it places them."""
    ranks = RayRanks(config)
    try:
        places = ranks.places()
        backend = backend_of(config, places[0])
        address = ranks.cluster.address
        store = open_store(places[0], address, 0, config.init_timeout)
        ranks.serve(model, config, places, store.port)
    except BaseException:
        ranks.close()
        raise
    return places[0], backend, address, store, ranks


def run_node(model: Path, config: EngineConfig) -> int:
    """All ranks of a machine other than the first, until they end. Returns the exit code."""
    size = place_of(config, 0).local_size
    address, port = config.master_addr, config.master_port
    processes = RankProcesses(_starts(model, config, address, port, range(size)))
    place = place_of(config, 0)
    over = threading.Event()

    def watch() -> None:
        try:
            store = open_store(place, address, port, config.init_timeout)
        except RankFailed:  # the ranks say so too
            return
        given_up = wait_for_end(store)
        over.set()
        if given_up:  # one may be stopped, or wait for its GPU
            processes.kill()
        else:
            processes.wait()

    threading.Thread(target=watch, name="trueline-node", daemon=True).start()
    try:
        for rank, code in processes.ended():
            if code < 0 and not over.is_set():  # it could not say why
                with suppress(RankFailed):  # rank 0 is gone too
                    store = open_store(place, address, port, SECONDS_TO_TELL)
                    report(store, rank, how_it_ended(code))
            if code:
                return 1
        return 0
    finally:
        processes.close()


def _starts(
    model: Path, config: EngineConfig, address: str, port: int, local_ranks: range
) -> list[WorkerStart]:
    places = [place_of(config, local_rank) for local_rank in local_ranks]
    return [
        WorkerStart(
            model=str(model),
            config=config,
            rank=place.rank,
            local_rank=place.local_rank,
            local_size=place.local_size,
            address=address,
            port=port,
        )
        for place in places
    ]


def join_under_torchrun(config: EngineConfig) -> RankGroup:
    place = launched_place()
    if place.size != config.tensor_parallel_size:
        raise UsageError(
            f"tensor_parallel_size = {config.tensor_parallel_size}: torchrun has started "
            f"{place.size} ranks"
        )
    return join_launched(place, backend_of(config, place), config.init_timeout)
