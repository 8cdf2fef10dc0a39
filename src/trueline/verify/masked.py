"""Prefill that attends over everything and hides what its tokens did not choose, in the running
engine. Where there is no GPU, its kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from trueline.cache.kinds.latent import Latent, LatentInput, LatentInputs, LatentRows
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.executor import LocalExecutor, local_runner
from trueline.engine.loading import load_engine
from trueline.engine.runner import Runner, build_decoder
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, oracle, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import base, prompt
from trueline.weights.load import StoredWeights

HEAD = prompt(88, 3)
BUDGET = 54
ASKS = [
    Ask(HEAD, 2),
    # In one step: a new prompt, and a few tokens after what is cached already.
    Ask(prompt(41), 3, arrives=4),
    Ask([*HEAD[:84], *prompt(13, 5)], 2, arrives=4),
    Ask(prompt(45), 2, arrives=5),  # while others decode
]
Situation = Callable[[LatentRows, int], bool]
SITUATIONS: dict[str, Situation] = {
    "alone": lambda rows, topk: not rows.selected_at,
    "over chosen rows of steps before": lambda rows, topk: rows.masked[0].row.start > topk,
    "before rows with lists": lambda rows, topk: (
        bool(rows.selected_at) and not rows.masked[0].chosen
    ),
    "after rows with lists": lambda rows, topk: rows.masked[0].chosen > 0,
}


def masked_prefill(subject: Subject) -> None:
    """Every position equals the float64 reference, wherever such runs stand in a step."""
    config = replace(base(subject), block_size=3, max_num_batched_tokens=BUDGET, poison=True)
    config = replace(config, enforce_eager=True)
    on_gpu = find_device(config.device).is_gpu
    core = load_engine(subject.model, config).core if on_gpu else interpreted(subject, config)
    missing = dict(SITUATIONS)
    inputs = local_runner(core.executor).inputs.kinds[Latent.name]
    assert isinstance(inputs, LatentInputs)
    _watch(inputs, missing)
    try:
        done = serve(core, ASKS)
    finally:
        core.close()
    if missing:
        raise CheckFailed(f"masked prefill: none was seen {', '.join(missing)}")
    oracle(subject.model, ASKS, done)


def _watch(inputs: LatentInputs, missing: dict[str, Situation]) -> None:
    build, topk = inputs.build, inputs.topk
    assert topk is not None

    def watched(rows: LatentRows, cells: Sequence[Tensor]) -> LatentInput:
        for what, holds in list(missing.items()):
            if rows.masked and holds(rows, topk):
                del missing[what]
        return build(rows, cells)

    inputs.build = watched  # type: ignore[method-assign]


def interpreted(subject: Subject, config: EngineConfig) -> EngineCore:
    """On a CPU: Triton's prefill, and for the rest what a CPU has."""
    spec = read_model(subject.model, config.facts)
    plan = make_plan(spec, replace(config, ops={"mla_prefill": "triton"}), find_device("cpu"))
    values = StoredWeights(subject.model, spec, dtype=plan.weight_dtype)
    runner = Runner(spec, plan, build_decoder(spec, plan, values))
    return EngineCore(LocalExecutor(runner, threaded=plan.limits.overlap), plan, config)
