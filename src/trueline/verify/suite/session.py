"""What a run of `trueline verify` works on: a model, the engine's options, prompts and sizes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import find_device, recover
from trueline.engine.caches import Caches
from trueline.engine.core import EngineCore
from trueline.engine.executor import LocalExecutor, local_runner
from trueline.engine.loading import load_engine
from trueline.engine.runner import Runner
from trueline.models import read_model
from trueline.plan.plan import Plan, make_plan
from trueline.spec.mixer import CompressedSpec, MLASpec
from trueline.spec.model import ModelSpec
from trueline.verify.engine import close
from trueline.verify.suite.definition import Definition

SMALL_BYTES = 400_000_000
"""Of weights: the definition of such a model stays in memory whole, in float64 and in its dtype."""
PART_OF_MEMORY = 0.2
"""Of what is free: for layers of a larger one, which are read when they are needed."""
USED_POSITIONS, USED_SLOTS = 512, 8
"""Those of an engine that holds numbers before its first request."""
MOST_SCORES = 1 << 27
"""Attention scores that the definition holds at a time, of all heads."""


@dataclass(frozen=True)
class DrawnTokens:
    vocab: int
    seed: int
    """Of the run."""

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(7919 * (self.seed + 1) + 1000 * seed + length)
        return torch.randint(self.vocab, (max(length, 1),), generator=generator).tolist()


class Started(NamedTuple):
    """An engine that has run."""

    config: EngineConfig
    changes: frozenset[str]
    """Options that the composition was about."""
    plan: Plan


@dataclass
class Session:
    name: str
    model: Path
    config: EngineConfig
    prompt: list[int] | None = None
    """The user's own."""
    seed: int = 0
    plan: Plan = field(init=False)
    started: list[Started] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.config.data_parallel_size > 1 and self.config.data_parallel_rank is None:
            self.config = replace(self.config, data_parallel_rank=0)
        loaded = load_engine(self.model, self.config)
        self.plan, self.plan_lines = loaded.plan, list(loaded.lines())
        self.common_block = loaded.core.blocks.lcm_block_size
        self._decoder = local_runner(loaded.core.executor).decoder
        loaded.core.close()
        if self.plan.device.is_gpu:
            loaded.core.late_kernels.stop()  # checks ask for more than what serves
            # the checks and the definition take the memory of its caches
            del loaded
            gc.collect()
            recover()

    @property
    def in_processes(self) -> bool:
        """Whether ranks are processes, which are started for each engine: their layers are theirs.
        What is watched is rank 0, whose inputs and outputs are those of the whole model."""
        return self.config.backend != "uni"

    @cached_property
    def spec(self) -> ModelSpec:
        return read_model(self.model, self.config.facts)

    @cached_property
    def definition(self) -> Definition:
        plan = self.plan
        return Definition(
            self.model,
            plan.compute_dtype,
            plan.weight_dtype,
            plan.numerics.name,
            self.config.facts,
            str(plan.device.torch),
            room=None if self.weight_bytes <= SMALL_BYTES else self._room(),
        )

    @property
    def weight_bytes(self) -> int:
        """Of all ranks, about."""
        return self.plan.weight_bytes * self.config.tensor_parallel_size

    def _room(self) -> int:
        """Bytes of layers that the definition may keep beside the one it works on."""
        return int(find_device(self.plan.device.kind).free_memory * PART_OF_MEMORY)

    @contextmanager
    def core(self, **changes: Any) -> Iterator[EngineCore]:
        core = self._core(self.engine_config(**changes))
        self.started.append(Started(core.config, frozenset(changes), core.plan))
        try:
            yield core
        finally:
            close(core)

    def _core(self, config: EngineConfig) -> EngineCore:
        """With the layers that are loaded, where these options change nothing about them."""
        if self.in_processes:
            return load_engine(self.model, config).core
        plan = make_plan(self.spec, config, self.plan.device)
        if (
            _layers_of(plan) != _layers_of(self.plan)
            or plan.max_model_len > self.plan.max_model_len
        ):
            return load_engine(self.model, config).core
        runner = Runner(self.spec, plan, self._decoder)
        _as_after_others(runner.caches, plan)
        if runner.graphs is not None:
            runner.graphs.capture_all()
        threaded = plan.limits.overlap and not plan.device.is_gpu
        return EngineCore(LocalExecutor(runner, threaded=threaded), plan, config)

    def engine_config(self, **changes: Any) -> EngineConfig:
        """The user's, held to what the checks' requests need."""
        config = self.config
        least: dict[str, Any] = {
            "max_model_len": min(self.longest, config.max_model_len or self.longest),
            "max_num_seqs": config.max_num_seqs or 8,
            "enforce_eager": True,
        }
        if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None:
            least["num_gpu_blocks_override"] = 2 + 16 * -(-self.longest // self.plan.block_size)
        if self.plan.slots and config.num_state_slots is None:
            least["num_state_slots"] = 24
        return replace(config, **least | changes)

    def angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """cos and sin of these positions, by layer, as the engine looks them up."""
        rows = self._decoder.ropes.at(positions.to(self.plan.device.torch))
        return [None if pair is None else (pair[0].cpu(), pair[1].cpu()) for pair in rows]

    # -- sizes at which something changes --------------------------------------------------

    @cached_property
    def longest(self) -> int:
        """Positions of the longest request that the definition can hold here."""
        heads = max(
            (h.total for layer in self.spec.layers if (h := getattr(layer.mixer, "heads", None))),
            default=1,
        )
        most = int((MOST_SCORES / heads) ** 0.5)
        return min(max(most, 256), self.plan.max_model_len, 4096)

    @property
    def topk(self) -> int | None:
        """Positions up to which an indexer chooses nothing."""
        for layer in self.spec.layers:
            mixer = layer.mixer
            if isinstance(mixer, MLASpec) and mixer.indexer is not None:
                return mixer.indexer.topk
            if isinstance(mixer, CompressedSpec) and mixer.indexer is not None:
                assert mixer.compressor is not None
                return (mixer.indexer.topk + 1) * mixer.compressor.ratio - 1
        return None

    @property
    def windows(self) -> list[int]:
        """Positions of a window, and of an entry, where there are any."""
        found = {
            size
            for layer in self.spec.layers
            if isinstance(layer.mixer, CompressedSpec)
            for size in (
                layer.mixer.window,
                layer.mixer.compressor.ratio if layer.mixer.compressor else 1,
            )
        }
        return sorted(found - {1})

    @property
    def drawn(self) -> DrawnTokens:
        return DrawnTokens(self.spec.vocab.total, self.seed)

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        return self.drawn.tokens(length, seed)

    def opening(self, length: int) -> list[int]:
        """The user's prompt, or drawn tokens."""
        return (self.prompt or self.tokens(length))[: self.longest - 16]


def _layers_of(plan: Plan) -> tuple[object, ...]:
    """What the layers are built from."""
    chosen = [(op, each.name) for op, each in plan.selections.items()]
    stored = [(form, op, s.name) for form, ops in plan.by_format.items() for op, s in ops.items()]
    layers = [(kind, each.name) for kind, each in plan.layers.items()]
    dtypes = plan.compute_dtype, plan.weight_dtype, plan.numerics.name
    return *dtypes, plan.batch_invariant, plan.tiling, tuple(chosen), tuple(stored), tuple(layers)


@torch.inference_mode()
def _as_after_others(caches: Caches, plan: Plan) -> None:
    """Numbers in the blocks and slots that are given first, as other requests leave them, and in
    null places, as padding does: fresh memory is all zeros as likely as not, and then who reads
    what was never written goes unseen."""
    device = plan.device.torch
    with torch.random.fork_rng([device] if plan.device.is_gpu else []):
        torch.manual_seed(0)
        for group in plan.groups:
            count = 1 + -(-USED_POSITIONS // group.block_size)
            for kind in group.kinds:
                caches.paged[kind.name].randomise(range(min(count, group.num_blocks)))
        for slotted in caches.slotted.values():
            assert plan.slots is not None
            slotted.randomise(range(min(1 + USED_SLOTS, plan.slots.num_slots)))


def lengths_around(size: int, longest: int, *, most: int = 3) -> Sequence[int]:
    """One less, the same, one more; and twice as many, one more."""
    wanted = (size - 1, size, size + 1, 2 * size, 2 * size + 1)
    return [n for n in wanted if 0 < n <= longest][: most + 2]
