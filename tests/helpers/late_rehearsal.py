"""Which kernels a rehearsal of ranks launches that it has not compiled before, on no GPU.

    python tests/helpers/late_rehearsal.py NAME CONTEXT

(of a benchmark config) as JSON: how many are compiled ahead, and the late ones; and what each step
with one layer of each kind all-reduces. Needs TRITON_INTERPRET unset.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from hopper import H200
from late_kernels import NoData, answer, pretend
from paths import CONFIGS
from trueline.device import META
from trueline.models import read_model


def main(name: str, context: int) -> None:
    """Imported here: kernels are made when their modules are."""
    asked = pretend()
    from trueline.bench.ranks import rank as ranks
    from trueline.bench.ranks.projection import Interconnect
    from trueline.bench.ranks.rehearsal import Scenario
    from trueline.cache.store import LatentStore
    from trueline.engine.warmup import Asked
    from trueline.ops.jit import dry_run

    answer(False)
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda _: None
    LatentStore.randomise = lambda *_: None  # type: ignore[method-assign]
    ranks.DummyWeights = lambda spec, dtype, **_: NoData(  # type: ignore[assignment,misc]
        spec, dtype=dtype, device=torch.device(META), seed=0
    )
    ranks.capture_for = lambda _: captured
    scenario = Scenario(interconnect=Interconnect(8, 0, 1), context=context)
    spec = ranks.rank_spec(read_model(CONFIGS / name), 8, expert_parallel=False)
    rank = ranks.Rank(spec, scenario.config(), H200, 8, scenario.depth)
    rank.compile(scenario.decode, scenario.prefill)
    ready = set(asked.kernels)
    with dry_run(Asked()):
        shallow, *_ = [
            list(
                rank.costs(
                    kept, scenario.decode, scenario.prefill, lambda step, _: bool(step.run())
                )
            )
            for kept in (rank.shallow(), *(rank.deeper(kind) for kind in rank.kinds))
        ]
    late = [text for kernel, text in asked.kernels.items() if kernel not in ready]
    exchanges = [(cost.exchanges.all_reduces, cost.exchanges.reduced_bytes) for cost in shallow]
    print(json.dumps({"ready": len(ready), "late": late, "exchanges": exchanges}))


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """As a CUDA graph: what replays it runs no line of Python."""
    step()
    return lambda: None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
