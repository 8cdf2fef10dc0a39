"""One rank without the others: a few layers of each kind with drawn weights at local shapes, and
steps over some of these layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from trueline.bench.footprint import tensor_bytes
from trueline.bench.ranks.projection import Exchanges, StepCost
from trueline.config import EngineConfig
from trueline.device import Device, num_cores
from trueline.engine.batch import Batch
from trueline.engine.graphs import Captured, capture_for
from trueline.engine.memory import made_up_batch
from trueline.engine.params import SamplingParams
from trueline.engine.runner import Runner, build_decoder
from trueline.layers.context import RecordedChoices
from trueline.layers.decoder import Decoder
from trueline.native import use_threads
from trueline.ops.sampling import SamplingState, build_rows
from trueline.plan.plan import make_plan
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.shard import local_spec
from trueline.weights.dummy import DummyWeights

MOST_THREADS = 16
"""That compile kernels."""
GREEDY = SamplingParams(temperature=0.0)
STRIDE = 7919
"""Between the token ids of a step: different tokens take different experts."""

Rows = Sequence[tuple[int, int]]
"""(start, count) of each row of a step."""


class Rehearsed:
    """In place of the other ranks: results of the right shapes, and an account of what the current
    step has asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.exchanges = Exchanges()

    def begin_step(self) -> None:
        self.exchanges = Exchanges()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.exchanges = self.exchanges.plus(Exchanges(all_reduces=1, reduced_bytes=x.nbytes))
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = torch.cat([x] * self.size, dim)
        asked = Exchanges(all_gathers=1, gathered_bytes=gathered.nbytes)
        self.exchanges = self.exchanges.plus(asked)
        return gathered

    def from_first(self, x: Tensor) -> Tensor:
        """A broadcast: as much goes over the wires as in an all-gather of its size."""
        self.exchanges = self.exchanges.plus(Exchanges(all_gathers=1, gathered_bytes=x.nbytes))
        return x


@dataclass(frozen=True, slots=True)
class LayerKind:
    name: str
    layers: tuple[int, ...]
    """Which of the model's."""


def layer_kinds(spec: ModelSpec) -> list[LayerKind]:
    """In the order of their first layers."""
    found: list[list[int]] = []
    for i, layer in enumerate(spec.layers):
        alike = (kind for kind in found if _same_kind(spec.layers[kind[0]], layer))
        kind = next(alike, None)
        if kind is None:
            found.append(kind := [])
        kind.append(i)
    return [LayerKind(_name(spec.layers[kind[0]]), tuple(kind)) for kind in found]


def _same_kind(a: LayerSpec, b: LayerSpec) -> bool:
    return a.mixer.same_kind(b.mixer) and a.feed_forward.same_kind(b.feed_forward)


def _name(layer: LayerSpec) -> str:
    parts = [layer.mixer.label]
    if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None:
        parts.append("shared indexer" if layer.mixer.indexer.shared else "indexer")
    return " + ".join((*parts, layer.feed_forward.label))


def rank_spec(spec: ModelSpec, size: int, *, expert_parallel: bool) -> ModelSpec:
    """What the first rank computes."""
    return local_spec(spec, 0, size, expert_parallel=expert_parallel)


@dataclass(frozen=True, slots=True)
class Step:
    """One to be timed."""

    layers: tuple[LayerSpec, ...]
    tokens: int
    run: Callable[[], object]


Clock = Callable[[Step, Device], float]
"""Seconds of a step."""


class Rank:
    """The first rank, with up to 1 + `depth` layers of each kind."""

    def __init__(
        self, spec: ModelSpec, config: EngineConfig, device: Device, size: int, depth: int
    ) -> None:
        self.kinds = layer_kinds(spec)
        self.built = sorted(i for kind in self.kinds for i in kind.layers[: 1 + depth])
        self.spec = replace(spec, layers=tuple(spec.layers[i] for i in self.built))
        self.device, self.collective = device, Rehearsed(size)
        self.plan = make_plan(self.spec, config, device)
        torch.set_num_threads(self.plan.threads)
        if not device.is_gpu:
            use_threads(self.plan.threads)
        values = DummyWeights(
            self.spec, dtype=self.plan.weight_dtype, device=device.torch, seed=config.seed
        )
        self.decoder = build_decoder(self.spec, self.plan, values, self.collective)

    def shallow(self) -> tuple[int, ...]:
        """One layer of each kind, as places among those that are built."""
        return tuple(sorted(self.built.index(kind.layers[0]) for kind in self.kinds))

    def deeper(self, kind: LayerKind) -> tuple[int, ...]:
        """All that are built of one kind, and one of each other."""
        of_kind = [place for place, i in enumerate(self.built) if i in kind.layers]
        return tuple(sorted({*self.shallow(), *of_kind}))

    def weight_bytes(self) -> int:
        """Of the whole model on one rank, as packed."""
        layers = {
            i: tensor_bytes(layer) for i, layer in zip(self.built, self.decoder.layers, strict=True)
        }
        rest = tensor_bytes(self.decoder) - sum(layers.values())
        each = (
            len(kind.layers) * fmean(layers[i] for i in kind.layers if i in layers)
            for kind in self.kinds
        )
        return round(rest + sum(each))

    def costs(
        self, kept: Sequence[int], decode: Sequence[Rows], prefill: Rows, clock: Clock
    ) -> Iterator[StepCost]:
        """Of each decode step, then of the prefill step, in a model of these layers."""
        part = Part(self, kept)
        steps = [partial(part.decode_step, rows) for rows in decode]
        steps.append(partial(part.eager_step, prefill))
        for make in steps:  # not all at once: captured steps share their input buffers
            seconds = clock(make(), self.device)
            yield StepCost(seconds, self.collective.exchanges)

    def local_pairs(self, prefill: Rows) -> float | None:
        """Which part of the pairs of tokens and experts this rank computes; None: no experts."""
        recorded = RecordedChoices()
        Part(self, range(len(self.built))).eager_step(prefill, recorded).run()
        experts = {
            layer.index: layer.feed_forward.experts
            for layer in self.spec.layers
            if isinstance(layer.feed_forward, MoESpec)
        }
        here = [
            ((ids >= experts[index].start) & (ids < experts[index].stop)).float().mean().item()
            for index, ids in recorded.experts.items()
        ]
        return fmean(here) if here else None

    def compile(self, decode: Sequence[Rows], prefill: Rows) -> None:
        """The kernels of these steps, in several threads at once."""
        from triton import AsyncCompileMode

        from trueline.engine.dry_run import DryRun
        from trueline.engine.warmup import Asked
        from trueline.ops.jit import dry_run

        threads, here = min(num_cores(), MOST_THREADS), (torch.cuda.current_device(),)
        with ThreadPoolExecutor(threads, "kernels", torch.cuda.set_device, here) as pool:
            with AsyncCompileMode(pool) as compiled, dry_run(Asked()):
                dry = DryRun(self.spec, self.plan, self.decoder)
                graphs = dry.runner.graphs
                assert graphs is not None, "steps are captured"
                graphs.sizes = [len(rows) for rows in decode]
                dry.decode_graphs()
                dry.forward(prefill)
                dry.sample(len(prefill), GREEDY)
            # In threads too: Triton compiles a launcher in C for every signature.
            list(pool.map(lambda made: made.result()[(1, 1, 1)], compiled.future_kernels.values()))


class Part:
    """Some of a rank's layers with a cache of their own."""

    def __init__(self, rank: Rank, kept: Sequence[int]) -> None:
        self.rank = rank
        spec = replace(rank.spec, layers=tuple(rank.spec.layers[i] for i in kept))
        plan = rank.plan.of_layers(kept)
        capture = capture_for(plan)

        def counted(step: Captured) -> Captured:
            def run() -> None:
                rank.collective.begin_step()
                step()

            assert capture is not None
            return capture(run)

        decoder = _with_layers(rank.decoder, kept)
        self.runner = Runner(spec, plan, decoder, counted if capture else None)
        caches = self.runner.caches
        for group in plan.groups:
            for kind in group.kinds:
                caches.paged[kind.name].randomise(range(group.num_blocks))
        for slotted in caches.slotted.values():
            assert plan.slots is not None
            slotted.randomise(range(plan.slots.num_slots))

    def decode_step(self, rows: Rows) -> Step:
        """Captured where the plan captures, its exchanges counted then. Until the next one."""
        graphs = self.runner.graphs
        if graphs is None:
            return self.eager_step(rows)
        batch = self._batch(rows)
        graphs.sizes = [len(rows)]
        graphs.limits = [graphs.key_for(len(rows), 1, max(batch.positions) + 1).longest]
        graphs.capture_all()
        return Step(self.runner.spec.layers, len(batch.tokens), graphs.dummy_step(batch))

    def eager_step(self, rows: Rows, recorded: RecordedChoices | None = None) -> Step:
        """With logits and a sampled token for the last token of each row."""
        batch = self._batch(rows)
        return Step(
            self.runner.spec.layers, len(batch.tokens), lambda: self._forward(batch, recorded)
        )

    def _batch(self, rows: Rows) -> Batch:
        return made_up_batch(self.runner.plan, rows, spread=True)

    @torch.inference_mode()
    def _forward(self, batch: Batch, recorded: RecordedChoices | None) -> None:
        self.rank.collective.begin_step()
        runner, inputs = self.runner, self.runner.inputs
        words = self.rank.spec.vocab
        ids = [words.start + (1 + i) * STRIDE % words.count for i in range(len(batch.tokens))]
        step = inputs.build(batch, inputs.tensor(ids), recorded)
        hidden = runner.decoder.hidden(step, runner.caches.views)
        last = inputs.tensor([row.tokens.stop - 1 for row in batch.rows])
        logits = runner.decoder.logits(hidden[last])
        runner.sampling.sample(logits, build_rows(_greedy(len(last)), self.rank.device.torch))


def _greedy(count: int) -> list[SamplingState]:
    return [
        SamplingState(
            params=GREEDY, prompt_ids=[0], output_ids=[], position=1, eos_ids=[], seed=seed
        )
        for seed in range(count)
    ]


def _with_layers(decoder: Decoder, kept: Sequence[int]) -> Decoder:
    part = copy(decoder)
    part.layers = [decoder.layers[i] for i in kept]
    part.ropes = copy(decoder.ropes)
    part.ropes.of_layer = [decoder.ropes.of_layer[i] for i in kept]
    return part
