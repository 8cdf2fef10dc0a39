"""A running engine with one part of the model, be it a half of a layer: its scheduler, its caches,
its ops, that part as the plan has it, and for all that is not there the rows of a recording. So a
composition runs again as it was scheduled, from what a file holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.index_keys import IndexInput, IndexKeys
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.executor import LocalExecutor
from trueline.engine.messages import Admission
from trueline.engine.runner import Runner, what_layers_get
from trueline.layers.context import FeedForward, HashedExperts, Mixer, StepInput, Weights
from trueline.layers.decoder import Decoder, Layer, make
from trueline.layers.residual import Mixing, Several, Single
from trueline.models import read_model
from trueline.native import use_threads
from trueline.parallel.placement import Replicated
from trueline.plan.plan import Plan, make_plan
from trueline.reference.model import FEED, MIX, Half
from trueline.spec.feedforward import MoESpec
from trueline.spec.model import ModelSpec
from trueline.verify.replay.file import HALVES, HEAD
from trueline.weights.load import StoredWeights

SURE = 1e4
"""The logit of the token that a request has sampled: no draw takes another."""


@dataclass(frozen=True)
class Given:
    """What one request has for the half, by position."""

    tokens: Sequence[int]
    input: Tensor
    """The half's own; for an entry or the head, the residual before it."""
    added: Tensor | None = None
    """Of an entry: the output of the half before, which the residual includes."""
    shared: Tensor | None = None
    """Keys that the layer before has chosen, where this one takes them."""


class GivenRows:
    """Which request a row is of. One that nobody has recorded, as those that fill the cache before,
    has another's rows."""

    def __init__(self, given: Mapping[int, Given]) -> None:
        self.waiting = dict(sorted(given.items()))
        self.filler = next(iter(self.waiting.values()))
        self.by_id: dict[int, Given] = {}

    def admit(self, admission: Admission) -> None:
        prompt = admission.prompt_token_ids
        for number, each in self.waiting.items():
            if list(each.tokens[: len(prompt)]) == prompt:
                self.by_id[admission.id] = self.waiting.pop(number)
                return
        self.by_id[admission.id] = self.filler

    def rows(self, what: str, batch: Batch) -> Tensor | None:
        """Of the step's tokens; None where it is nothing that this part has."""
        found = []
        for row in batch.rows:
            recorded: Tensor | None = getattr(self.by_id[row.id], what)
            if recorded is None:
                return None
            at = torch.arange(row.start, row.start + row.count)
            found.append(recorded[at.clamp_max(len(recorded) - 1)])
        return torch.cat(found)

    def next_tokens(self, batch: Batch) -> Tensor:
        """What each row's request goes on with; after its last, and after a filler's, anything."""
        found = [
            tokens[p + 1] if p + 1 < len(tokens) else 0
            for row in batch.rows
            for tokens in [self.by_id[row.id].tokens]
            for p in range(row.start, row.start + row.count)
        ]
        return torch.tensor(found)


class _OneHalf(Layer):
    """A layer of which there is one half, or none: what it is given is seen all the same."""

    def __init__(self, index: int, mixer: object = None, feed_forward: object = None) -> None:
        self.index = index
        self.mixer = cast("Mixer", mixer or _Nothing())
        self.feed_forward = cast("FeedForward", feed_forward or _Nothing())
        self.hashed: HashedExperts | None = None


class _Nothing:
    spec = None

    def forward(self, x: Any, *given: Any) -> Any:
        return x if len(given) > 1 else (x, None)


class Alone(Decoder):
    """A part of the model. What a step computes is the part's output, which is watched; what it
    samples is recorded."""

    batch: Batch

    def __init__(self, spec: ModelSpec, plan: Plan, at: int, weights: Weights) -> None:
        """`at`: the layer's place among those of `spec`."""
        build = self.build = what_layers_get(spec, plan)
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        self.compute, self.ropes, self.device = plan.compute_dtype, build.ropes, plan.device.torch
        self.at, self.layer = at, spec.layers[at]
        self.name = f"model.layers.{self.layer.index}"
        self.layers: list[Layer] = [_OneHalf(self.layer.index)]
        self.take(weights)

    given: GivenRows

    def take(self, weights: Weights) -> None:
        """Those of this part."""
        raise NotImplementedError

    def run(self, rows: Tensor, step: StepInput, views: LayerViews) -> None:
        raise NotImplementedError

    def hidden(self, step: StepInput, views: Sequence[LayerViews]) -> Tensor:
        rows = self.given.rows("input", self.batch)
        assert rows is not None, "every request has inputs"
        self.run(rows.to(self.device), step, views[self.at])
        return self.given.next_tokens(self.batch).to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        made = torch.zeros(len(hidden), self.spec.vocab.total, device=hidden.device)
        return made.scatter_(1, hidden[:, None], SURE)

    def streams(self, weights: Weights | None) -> Several | None:
        """Of hyper-connections; `weights`: of the model's last mixing."""
        spec, op = self.spec.hyper_connections, self.ops.hyper_connections
        if spec is None:
            return None
        assert op is not None, "the plan knows of hyper-connections"
        nothing = cast("Mixing", None)
        last = Mixing.of(weights, "model.hc_head") if weights else nothing
        return Several(self.ops.rms_norm, self.spec.norm_eps, op, spec, last)


class MixerAlone(Alone):
    def take(self, weights: Weights) -> None:
        made = make(self.layer.mixer, self.build, weights, f"{self.name}.self_attn")
        self.layers = [_OneHalf(self.layer.index, mixer=made)]

    def run(self, rows: Tensor, step: StepInput, views: LayerViews) -> None:
        self._share(step)
        rope = self.ropes.at(step.positions)[self.at]
        x = Replicated(rows.to(self.compute))
        self.layers[0].mixer.forward(x, step, views, rope)

    def _share(self, step: StepInput) -> None:
        """What the layer before has left for this one."""
        shared = self.given.rows("shared", self.batch)
        index = step.kinds.get(IndexKeys.name)
        if shared is not None and isinstance(index, IndexInput) and index.count:
            at = index.at if isinstance(index.at, slice) else index.at.cpu()
            index.chosen = shared[at].to(self.device)


class FeedForwardAlone(Alone):
    def take(self, weights: Weights) -> None:
        feed_forward = self.layer.feed_forward
        made = make(feed_forward, self.build, weights, f"{self.name}.mlp")
        one = _OneHalf(self.layer.index, feed_forward=made)
        if isinstance(feed_forward, MoESpec) and feed_forward.router.hashed:
            one.hashed = cast("HashedExperts", made)
        self.layers = [one]

    def run(self, rows: Tensor, step: StepInput, views: LayerViews) -> None:
        layer = self.layers[0]
        layer.feed_forward.forward(Replicated(rows.to(self.compute)), layer.choice(step))


class EntryAlone(Alone):
    """How a half reads the residual."""

    half: Half

    def take(self, weights: Weights) -> None:
        residual = self.streams(None) or Single(self.ops.rms_norm, self.spec.norm_eps)
        at = f"{self.name}.{self.half.norm}", f"{self.name}.{self.half.mixing}"
        self.residual, self.entry = residual, residual.entry(weights, *at)

    def run(self, rows: Tensor, step: StepInput, views: LayerViews) -> None:
        x, one = Replicated(self._read(rows)), self.layers[0]
        if self.half == FEED:
            one.feed_forward.forward(x, None)
        else:
            one.mixer.forward(x, step, views, None)

    def _read(self, rows: Tensor) -> Tensor:
        if isinstance(self.residual, Several):
            streams = self.residual.start(rows[:, 0].to(self.compute))
            streams.h = rows.to(self.compute)
            return streams.read(self.entry)
        added = self.given.rows("added", self.batch)
        if added is None:
            return self.residual.start(rows.to(self.compute)).read(self.entry)
        added = added.to(self.device)
        stream = self.residual.start((rows - added).to(self.compute))
        stream.add(added.to(self.compute))
        return stream.read(self.entry)


class MixerEntry(EntryAlone):
    half = MIX


class FeedForwardEntry(EntryAlone):
    half = FEED


class HeadAlone(Alone):
    """Its logits are its output, and what is sampled is drawn from them."""

    def take(self, weights: Weights) -> None:
        tied = self.spec.tied_embeddings
        embedding = weights.stored("model.embed_tokens.weight").dequantise()
        head = embedding if tied else weights.stored("lm_head.weight")
        self.norm, self.head = weights.take("model.norm.weight"), self.ops.linear.pack(head)
        self.several = self.streams(weights)

    def hidden(self, step: StepInput, views: Sequence[LayerViews]) -> Tensor:
        rows = self.given.rows("input", self.batch)
        assert rows is not None, "every request has inputs"
        h = rows.to(self.device, self.compute)
        if self.several is None:
            return h
        last, eps = self.several.head, self.several.spec.eps
        return self.several.op.head(
            h, last.fn, last.base, last.scale, norm_eps=self.several.eps, eps=eps
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return Decoder.logits(self, hidden)


PARTS: dict[str, type[Alone]] = {
    "mixer": MixerAlone,
    "feed forward": FeedForwardAlone,
    "entry of mixer": MixerEntry,
    "entry of feed forward": FeedForwardEntry,
    HEAD: HeadAlone,
}


class _Runner(Runner):
    decoder: Alone

    def admit(self, admission: Admission) -> None:
        super().admit(admission)
        self.decoder.given.admit(admission)

    def _forward(self, batch: Batch) -> Tensor:
        self.decoder.batch = batch
        return super()._forward(batch)


@contextmanager
def engine_of(
    part: str, layer: int, model: Path, config: EngineConfig, given: Mapping[int, Given]
) -> Iterator[EngineCore]:
    """`part`: one of PARTS, of that layer; `given`: by request. `model` has its config and the
    weights of this part at least."""
    spec = read_model(model, config.facts)
    plan = make_plan(spec, config, find_device(config.device))
    torch.set_num_threads(plan.threads)
    if not plan.device.is_gpu:
        use_threads(plan.threads)
    layer = min(layer, len(spec.layers) - 1)
    # and a layer for each state kind that this one does not keep: schedules depend on all
    others = {kind.layers[0] for kind in plan.kinds if layer not in kind.layers}
    kept = sorted({layer, *others})
    names = parameter_names(part, layer)
    stored = StoredWeights(model, spec, dtype=plan.weight_dtype, only=names)
    weights = Weights(stored, plan.compute_dtype, plan.device.torch)
    spec = replace(spec, layers=tuple(spec.layers[i] for i in kept))
    plan = plan.of_layers(kept)
    decoder = PARTS[part](spec, plan, kept.index(layer), weights)
    decoder.given = GivenRows(given)
    threaded = plan.limits.overlap and not plan.device.is_gpu
    core = EngineCore(LocalExecutor(_Runner(spec, plan, decoder), threaded=threaded), plan, config)
    try:
        yield core
    finally:
        core.close()


def parameter_names(part: str, layer: int) -> tuple[str, ...]:
    """How the names begin of what a part takes."""
    at = f"model.layers.{layer}"
    if part == HEAD:
        return ("model.embed_tokens.", "model.norm.", "lm_head.", "model.hc_head.")
    if part in HALVES:
        return (f"{at}.self_attn." if part == "mixer" else f"{at}.mlp.",)
    half = HALVES[part.removeprefix("entry of ")]
    return (f"{at}.{half.norm}.", f"{at}.{half.mixing}.")
