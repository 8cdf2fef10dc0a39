"""Captured decode steps with NCCL's collectives in them, at one rank, beside the same without:
what capturing them costs. What they cost between GPUs shows on a machine that has several."""

from __future__ import annotations

import json
import statistics
import sys

from trueline.bench.gpu.steps import replay_time
from trueline.bench.workload import bench_engine
from trueline.engine.executor import local_runner
from trueline.engine.memory import made_up_batch
from trueline.llm import LLMEngine
from trueline.utils.json_types import JSON

BATCHES = (1, 16, 64)
CONTEXT = 1024
ROUNDS = 7
CACHE_BYTES = 4 << 30
MOST = 1.03
"""Target: of the time without."""


def run(name: str) -> list[JSON]:
    """Both engines at a time, one step of each in turn."""
    engines = {
        backend: bench_engine(
            name,
            distributed_executor_backend=backend,
            max_model_len=2 * CONTEXT,
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        for backend in ("uni", "mp")
    }
    rows = []
    for batch in BATCHES:
        times: dict[str, list[float]] = {backend: [] for backend in engines}
        for _ in range(ROUNDS):
            for backend, engine in engines.items():
                times[backend].append(_step(engine, batch))
        without, with_nccl = (statistics.median(times[backend]) for backend in ("uni", "mp"))
        ratio = with_nccl / without
        row: JSON = {"model": name, "B": batch, "without_us": without, "with_us": with_nccl}
        rows.append(row | {"ratio": ratio, "met": ratio <= MOST})
    for engine in engines.values():
        engine.core.close()
    return rows


def _step(engine: LLMEngine, batch: int) -> float:
    graphs = local_runner(engine.core.executor).graphs
    assert graphs is not None, "this is about captured steps"
    rows = made_up_batch(engine.core.plan, [(CONTEXT, 1)] * batch, spread=True)
    return replay_time(graphs.dummy_step(rows))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
