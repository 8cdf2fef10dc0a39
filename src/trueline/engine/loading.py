"""From a model directory to a running core, with an account of what was decided and how long it
took."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.runner import Runner
from trueline.layers.context import Parameters
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.plan import Plan, make_plan
from trueline.spec.model import ModelSpec
from trueline.tiny.make import draw
from trueline.weights.load import FLOAT32_KINDS, StoredWeights

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    spec: ModelSpec
    plan: Plan
    core: EngineCore
    seconds: dict[str, float]
    """Start-up, phase by phase."""


def load_engine(model: Path, config: EngineConfig, progress: Progress | None = None) -> Loaded:
    clock = _Clock()
    spec = read_model(model, config.facts)
    device = find_device(config.device)
    plan = make_plan(spec, config, device)
    torch.set_num_threads(plan.threads)
    clock.lap("plan")
    values: Parameters
    if config.load_format == "dummy":
        values = draw_weights(spec, plan, config.seed)
    else:
        values = StoredWeights(model, spec, dtype=plan.weight_dtype, progress=progress)
    runner = Runner(spec, plan, values)
    core = EngineCore(runner, plan, config, _fingerprint(model, plan))
    clock.lap("weights and cache")
    return Loaded(spec, plan, core, clock.laps)


def draw_weights(spec: ModelSpec, plan: Plan, seed: int) -> dict[str, Tensor]:
    """Random weights that spread routing over all experts, without any file."""
    values = {}
    for parameter in parameters(spec):
        dtype = torch.float32 if parameter.kind in FLOAT32_KINDS else plan.weight_dtype
        values[parameter.name] = draw(parameter.name, parameter.shape, parameter.kind, seed).to(
            dtype
        )
    return values


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
