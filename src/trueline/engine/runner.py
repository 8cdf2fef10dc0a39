"""Executes batches, one after the other, on one rank: forward, logits, sampling.

Owns what depends on token values of steps not yet collected: the last sampled token of each
request and its outputs so far, so that the loop may run one step ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.cache.index import IndexStore, SparseView
from trueline.cache.state import StateStore
from trueline.cache.store import LatentStore
from trueline.engine.batch import Batch, ScoredPrompt
from trueline.engine.messages import CoreRequest, TokenScore
from trueline.layers.context import (
    Build,
    Ops,
    Parameters,
    PrefillSlice,
    SparseStep,
    StateStep,
    StepInput,
    Weights,
)
from trueline.layers.decoder import Decoder, Replay, View
from trueline.ops.sampling import RowState, Scored, build_rows
from trueline.parallel.collective import Collective, Solo
from trueline.plan import Plan, latent_mixers, linear_mixers, own_indexers
from trueline.spec.mixer import LightningSpec, MLASpec
from trueline.spec.model import ModelSpec

# Prompt positions whose logits are held at a time.
SCORED_ROWS = 256


@dataclass(slots=True)
class Result:
    """Per request: the sampled token with its scores, or why there is none."""

    samples: dict[str, TokenScore] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """NaN or infinite logits: never a random token."""
    prompt_scores: dict[str, tuple[int, list[TokenScore]]] = field(default_factory=dict)
    """Position of the first, and the scores of the tokens after each."""


@dataclass(slots=True)
class Story:
    """What sampling needs to know of a request; its outputs grow as they are drawn, ahead of what
    the core has collected."""

    request: CoreRequest
    output_ids: list[int]
    row: RowState


class Runner:
    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        values: Parameters,
        collective: Collective | None = None,
    ) -> None:
        self.spec, self.plan = spec, plan
        build = Build(plan, Ops(plan), collective or Solo())
        self.ops = build.ops
        self.sampling = plan.op("sampling")
        self.decoder = Decoder(spec, build, Weights(values, plan.compute_dtype))
        self.store = LatentStore(
            plan.layout, len(latent_mixers(spec)), plan.num_blocks, plan.compute_dtype
        )
        self.states = _state_store(spec, plan)
        self.index = _index_store(spec, plan)
        self.views = self._views()
        self.heads = latent_mixers(spec)[0].heads.count
        self.stories: dict[str, Story] = {}
        self.recorded: list[Replay] | None = None
        """Set to a list to record every step's choices."""
        self.forced: list[Replay] | None = None
        """Choices to take instead, step by step."""
        self.probe: Callable[[Batch, Tensor], None] | None = None
        """Set by checks: sees the logits of every token of every step."""

    def _views(self) -> list[View]:
        """Each layer's part of the cache it keeps."""
        latent = iter(self.store.views)
        states = iter(self.states.views if self.states else [])
        keys = iter(self.index.views if self.index else [])
        views: list[View] = []
        for layer in self.spec.layers:
            mixer = layer.mixer
            if isinstance(mixer, LightningSpec):
                views.append(next(states))
            elif isinstance(mixer, MLASpec) and mixer.indexer is not None:
                own = None if mixer.indexer.shared else next(keys)
                views.append(SparseView(next(latent), own))
            else:
                views.append(next(latent))
        return views

    def admit(self, key: str, request: CoreRequest, seed: int) -> None:
        outputs: list[int] = []
        row = RowState(
            params=request.params,
            prompt_ids=request.prompt_token_ids,
            output_ids=outputs,
            position=len(request.prompt_token_ids),
            eos_ids=request.eos_token_ids,
            seed=seed,
            bad_words=request.bad_word_ids,
        )
        self.stories[key] = Story(request, outputs, row)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Result:
        for name in batch.forget:
            self.stories.pop(name, None)
        hidden = self._forward(self._inputs(batch))
        if self.probe is not None:
            self.probe(batch, self.decoder.logits(hidden))
        result = Result()
        for wanted in batch.scored:
            scores = self._score_prompt(hidden, wanted)
            result.prompt_scores[wanted.request_id] = (wanted.start, scores)
        if batch.samples:
            self._sample(hidden, batch, result)
        return result

    def _inputs(self, batch: Batch) -> StepInput:
        tokens = list(batch.tokens)
        for index, name in batch.carried:
            tokens[index] = self.stories[name].output_ids[-1]
        prepared = None
        if batch.decode.lengths:
            prepared = self.ops.mla_decode.prepare(
                batch.decode, self.store.views[0], self.plan.tiling, self.heads
            )
        return StepInput(
            torch.tensor(tokens),
            torch.tensor(batch.positions),
            torch.tensor(batch.cells),
            batch.decode,
            _places(batch.decode_tokens),
            tuple(PrefillSlice(at, row) for at, row in batch.prefill),
            prepared,
            self._state_step(batch),
            self._sparse_step(batch),
        )

    def _sparse_step(self, batch: Batch) -> SparseStep | None:
        if not batch.sparse_tokens or self.index is None or self.plan.index is None:
            return None
        rows, tiling, topk = batch.sparse, self.plan.tiling, self.plan.index.topk
        return SparseStep(
            torch.tensor(batch.sparse_tokens),
            torch.tensor(rows.lengths),
            self.ops.index_scores.prepare(rows, self.index.views[0], tiling, topk=topk),
            self.ops.sparse_mla.prepare(rows, self.store.views[0], tiling),
            list(self.forced[0].positions) if self.forced else [],
        )

    def _state_step(self, batch: Batch) -> StateStep | None:
        if self.ops.lightning is None:
            return None
        count = batch.num_decode_rows
        decode = [row for _, row in batch.states[:count]]
        prepared = self.ops.lightning.prepare(decode) if decode else None
        return StateStep(count, prepared, batch.states[count:])

    def _forward(self, step: StepInput) -> Tensor:
        recorded = Replay() if self.recorded is not None else None
        forced = self.forced.pop(0) if self.forced else None
        hidden = self.decoder.hidden(step, self.views, recorded, forced)
        if self.recorded is not None and recorded is not None:
            recorded.positions = step.sparse.recorded if step.sparse else []
            self.recorded.append(recorded)
        return hidden

    def _sample(self, hidden: Tensor, batch: Batch, result: Result) -> None:
        indices = torch.tensor([index for index, _ in batch.samples])
        names = [name for _, name in batch.samples]
        logits = self.decoder.logits(hidden[indices])
        stories = [self.stories[name] for name in names]
        sampled = self.sampling.sample(logits, build_rows([story.row for story in stories]))
        tokens, bad = sampled.tokens.tolist(), sampled.bad.tolist()
        wanted = [story.request.params.logprobs for story in stories]
        scores = token_scores(tokens, sampled, wanted)
        for i, (name, story) in enumerate(zip(names, stories, strict=True)):
            story.output_ids.append(tokens[i])
            story.row.position += 1
            if bad[i]:
                result.broken.add(name)
            else:
                result.samples[name] = scores[i]

    def _score_prompt(self, hidden: Tensor, wanted: ScoredPrompt) -> list[TokenScore]:
        request = self.stories[wanted.request_id].request
        top = request.params.prompt_logprobs or 0
        rows = hidden[wanted.tokens]
        found: list[TokenScore] = []
        for start in range(0, len(rows), SCORED_ROWS):
            logits = self.decoder.logits(rows[start : start + SCORED_ROWS])
            at = wanted.start + start + 1
            targets = request.prompt_token_ids[at : at + len(logits)]
            scored = self.sampling.score(logits, torch.tensor(targets), top)
            found += token_scores(targets, scored, [top] * len(targets))
        return found


def _places(tokens: list[int]) -> slice | Tensor:
    """A slice where they follow each other, as without an indexer they always do."""
    if tokens == list(range(len(tokens))):
        return slice(0, len(tokens))
    return torch.tensor(tokens)


def _index_store(spec: ModelSpec, plan: Plan) -> IndexStore | None:
    if plan.index is None:
        return None
    return IndexStore(plan.index.layout, len(own_indexers(spec)), plan.num_blocks)


def _state_store(spec: ModelSpec, plan: Plan) -> StateStore | None:
    """For this rank's heads."""
    mixers = linear_mixers(spec)
    if not mixers or plan.state is None:
        return None
    heads, width, state = mixers[0].heads.count, mixers[0].head_dim, plan.state
    return StateStore(len(mixers), state.num_slots, heads, width, width, state.dtype, state.tail)


def token_scores(tokens: list[int], scored: Scored, wanted: list[int | None]) -> list[TokenScore]:
    """`wanted`: how many of the likeliest each row asked for; -1 is all, None nothing."""
    values, ranks = scored.logprobs.tolist(), scored.ranks.tolist()
    if not any(wanted):
        return [TokenScore(*each) for each in zip(tokens, values, ranks, strict=True)]
    likely = zip(scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True)
    tops = [
        list(zip(ids, numbers, strict=True))[: None if count == -1 else count or 0]
        for (ids, numbers), count in zip(likely, wanted, strict=True)
    ]
    return [TokenScore(*each) for each in zip(tokens, values, ranks, tops, strict=True)]
