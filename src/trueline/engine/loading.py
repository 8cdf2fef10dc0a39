"""From a model directory to a running core, with an account of what was decided and how long it
took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.drafts import Drafter
from trueline.engine.executor import LocalExecutor
from trueline.engine.memory import measure
from trueline.engine.runner import Runner, build_decoder
from trueline.layers.context import Parameters
from trueline.models import read_model
from trueline.native import use_threads
from trueline.plan.plan import Plan, make_plan
from trueline.spec.model import ModelSpec
from trueline.weights.dummy import DummyWeights
from trueline.weights.load import StoredWeights

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    spec: ModelSpec
    expected: Plan
    """Made before anything was loaded."""
    plan: Plan
    core: EngineCore
    seconds: dict[str, float]
    """Start-up, phase by phase."""


def load_engine(
    model: Path,
    config: EngineConfig,
    progress: Progress | None = None,
    drafter: Drafter | None = None,
) -> Loaded:
    num_drafts = drafter.num_tokens if drafter else 0
    clock = _Clock()
    spec = read_model(model, config.facts)
    device = find_device(config.device)
    plan = expected = make_plan(spec, config, device, num_draft_tokens=num_drafts)
    torch.set_num_threads(plan.threads)
    if not device.is_gpu:
        use_threads(plan.threads)
    clock.lap("plan")
    values: Parameters
    if config.load_format == "dummy":
        values = DummyWeights(
            spec, dtype=plan.weight_dtype, device=plan.device.torch, seed=config.seed
        )
    else:
        values = StoredWeights(model, spec, dtype=plan.weight_dtype, progress=progress)
    decoder = build_decoder(spec, plan, values)
    clock.lap("weights")
    if device.is_gpu:
        from trueline.engine.warmup import compile_kernels  # needs Triton

        compile_kernels(spec, plan, decoder)
        clock.lap("kernels")
        measured = measure(spec, plan, decoder)
        plan = make_plan(spec, config, device, measured, num_draft_tokens=num_drafts)
        clock.lap("measuring")
    runner = Runner(spec, plan, decoder)
    clock.lap("caches")
    if runner.graphs is not None:
        runner.graphs.capture_all()
        clock.lap("graphs")
    executor = LocalExecutor(runner, threaded=plan.limits.overlap and not device.is_gpu)
    core = EngineCore(executor, plan, config, _fingerprint(model, plan), drafter)
    if device.is_gpu:
        core.late_kernels.watch()
    return Loaded(spec, expected, plan, core, clock.laps)


def _fingerprint(model: Path, plan: Plan) -> str:
    """What a cached token depends on besides the tokens before it."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kept = (plan.compute_dtype, plan.numerics.name, plan.kinds, plan.slots)
    text = repr((str(model.resolve()), stats, kept))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
