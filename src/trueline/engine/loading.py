"""From a model directory to a running core, with an account of what was decided and how long it
took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.memory import measure
from trueline.engine.runner import Runner, build_decoder
from trueline.layers.context import Parameters
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.native import use_threads
from trueline.plan import Plan, make_plan
from trueline.spec.model import ModelSpec
from trueline.tiny.make import draw
from trueline.weights.load import FLOAT32_KINDS, StoredWeights

Progress = Callable[[int, int], None]
# What is left of a drawn correction bias, so that it does not choose the experts.
EVEN = 0.01


@dataclass(frozen=True)
class Loaded:
    spec: ModelSpec
    expected: Plan
    """Made before anything was loaded."""
    plan: Plan
    core: EngineCore
    seconds: dict[str, float]
    """Start-up, phase by phase."""


def load_engine(model: Path, config: EngineConfig, progress: Progress | None = None) -> Loaded:
    clock = _Clock()
    spec = read_model(model, config.facts)
    device = find_device(config.device)
    plan = expected = make_plan(spec, config, device)
    torch.set_num_threads(plan.threads)
    if not device.is_gpu:
        use_threads(plan.threads)
    clock.lap("plan")
    values: Parameters
    if config.load_format == "dummy":
        values = DrawnWeights(spec, plan, config.seed)
    else:
        values = StoredWeights(model, spec, dtype=plan.weight_dtype, progress=progress)
    decoder = build_decoder(spec, plan, values)
    clock.lap("weights")
    if device.is_gpu:
        from trueline.engine.warmup import compile_kernels  # needs Triton

        compile_kernels(spec, plan, decoder)
        clock.lap("kernels")
        plan = make_plan(spec, config, device, measure(spec, plan, decoder))
        clock.lap("measuring")
    runner = Runner(spec, plan, decoder)
    clock.lap("caches")
    if runner.graphs is not None:
        runner.graphs.capture_all()
        clock.lap("graphs")
    core = EngineCore(runner, plan, config, _fingerprint(model, plan))
    if device.is_gpu:
        core.late_kernels.watch()
    return Loaded(spec, expected, plan, core, clock.laps)


class DrawnWeights:
    """Random weights that spread routing over all experts, without any file: each drawn, on the
    plan's device, when it is taken."""

    def __init__(self, spec: ModelSpec, plan: Plan, seed: int) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters(spec)}
        self._plan, self._seed = plan, seed

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def pop(self, name: str) -> Tensor:
        parameter, plan = self._parameters.pop(name), self._plan
        dtype = torch.float32 if parameter.kind in FLOAT32_KINDS else plan.weight_dtype
        value = draw(name, parameter.shape, parameter.kind, self._seed, plan.device.torch)
        if parameter.kind == "correction_bias":
            value *= EVEN  # a checkpoint's bias evens out what its router prefers: ours has none
        return value.to(dtype)


def _fingerprint(model: Path, plan: Plan) -> str:
    """What a cached token depends on besides the tokens before it."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kept = (plan.layout, plan.compute_dtype, plan.state, plan.index)
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
