"""The engine on several ranks, each a thread of this process with a spec, weights and cache of its
own; and that it computes what one rank does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.executor import LocalExecutor
from trueline.engine.runner import Runner, build_decoder
from trueline.models import read_model
from trueline.parallel.collective import Collective, Threads
from trueline.parallel.distributed import Journal
from trueline.parallel.stated import Stated
from trueline.plan.plan import make_plan
from trueline.spec.shard import local_spec
from trueline.verify.engine import Ask, EngineRun, Observer, run, same, serve
from trueline.verify.failed import CheckFailed
from trueline.weights.load import StoredWeights


def ranks_are_as_one(
    model: Path,
    asks: Sequence[Ask],
    config: EngineConfig,
    *sizes: int,
    expert_parallel: Sequence[bool] = (False,),
) -> EngineRun:
    """Every position on every rank: within the band, and bit by bit in batch-invariant mode.
    Returns what one rank saw."""
    one = run(model, asks, config)
    for size, whole in product(sizes, expert_parallel):
        served = serve_on_ranks(model, asks, config, size, expert_parallel=whole)
        for number, done in enumerate(served):
            experts = "whole" if whole else "by width"
            what = f"ranks = one: rank {number} of {size}, experts {experts}"
            if [rows.keys() for rows in done.logits] != [rows.keys() for rows in one.logits]:
                raise CheckFailed(f"{what}: other positions were computed")
            same(what, done, one, bitwise=config.batch_invariant)
    return one


def serve_on_ranks(
    model: Path,
    asks: Sequence[Ask],
    config: EngineConfig,
    size: int,
    *,
    expert_parallel: bool = False,
    watching: Callable[[EngineCore], Observer] | None = None,
) -> list[EngineRun]:
    """What each of `size` ranks saw. `watching`: rank 0's core."""
    spec = read_model(model, config.facts)
    group, statements = Threads(size), Threads(size)
    results: dict[int, EngineRun] = {}
    failures: list[Exception] = []

    def rank(number: int) -> None:
        try:
            local = local_spec(
                spec,
                number,
                size,
                invariant_sums=config.batch_invariant,
                expert_parallel=expert_parallel,
            )
            plan = make_plan(local, config, find_device("cpu"))
            values = StoredWeights(model, local, dtype=plan.weight_dtype)
            ranks: Collective = group.rank(number)
            if config.debug_collectives:
                ranks = Stated(ranks, statements.rank(number), Journal())
            decoder = build_decoder(local, plan, values, ranks)
            runner = Runner(local, plan, decoder, rank=number)
            executor = LocalExecutor(runner, threaded=plan.limits.overlap)
            core = EngineCore(executor, plan, config)
            observer = watching(core) if watching is not None and number == 0 else None
            results[number] = serve(core, asks, observer=observer)
        except Exception as error:
            failures.append(error)
            group.stop()
            statements.stop()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[i] for i in range(size)]
