"""The engine on several ranks, each a thread of this process with a spec, weights and cache of its
own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.runner import Runner, build_decoder
from trueline.models import read_model
from trueline.parallel.collective import Threads
from trueline.plan import make_plan
from trueline.spec.shard import local_spec
from trueline.verify.engine import Ask, Run, serve
from trueline.weights.load import load_weights


def serve_on_ranks(model: Path, asks: Sequence[Ask], config: EngineConfig, size: int) -> list[Run]:
    """What each of `size` ranks saw."""
    spec = read_model(model, config.facts)
    plan = make_plan(spec, config, find_device("cpu"))
    group = Threads(size)
    results: dict[int, Run] = {}
    failures: list[Exception] = []

    def rank(number: int) -> None:
        try:
            local = local_spec(spec, number, size)
            values = load_weights(model, local, dtype=torch.float32)
            decoder = build_decoder(local, plan, values, group.rank(number))
            runner = Runner(local, plan, decoder)
            results[number] = serve(EngineCore(runner, plan, config), asks)
        except Exception as error:
            failures.append(error)
            group.stop()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[i] for i in range(size)]
