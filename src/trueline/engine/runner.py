"""Executes batches, one after the other, on one rank: forward, logits, sampling.

A step is launched, and its result fetched later: on a GPU the host does not wait in between. So
the runner keeps what depends on token values of steps not yet fetched: the tokens sampled last, on
the device, and each request's outputs so far.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.engine.batch import Batch, SamplingPoint, ScoredTokens, build_batch
from trueline.engine.caches import Caches
from trueline.engine.canaries.guard import Canaries
from trueline.engine.graphs import Capture, DecodeGraphs, capture_for
from trueline.engine.inputs import Inputs
from trueline.engine.masks import TokenMasks
from trueline.engine.messages import Admission, StepMessage, Unowned
from trueline.engine.results import PromptScores, SampledTokens, StepHandle
from trueline.grammar.guide import Guide
from trueline.layers.context import Build, Ops, Parameters, RecordedChoices, Weights
from trueline.layers.decoder import Decoder
from trueline.layers.ropes import Ropes
from trueline.ops.sampling import SamplingState, build_rows
from trueline.parallel.collective import Collective, RowParallel, Solo
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec
from trueline.spec.shard import whole_spec
from trueline.spec.source import Span

# Prompt positions whose logits are held at a time.
SCORED_ROWS = 256


def build_decoder(
    spec: ModelSpec, plan: Plan, values: Parameters, collective: Collective | None = None
) -> Decoder:
    """The layers with their weights, on the plan's device."""
    weights = Weights(values, plan.compute_dtype, plan.device.torch)
    return Decoder(spec, what_layers_get(spec, plan, collective), weights)


def what_layers_get(spec: ModelSpec, plan: Plan, collective: Collective | None = None) -> Build:
    ranks, invariant_sums = collective or Solo(), spec.outputs is not None
    alone = spec == whole_spec(spec)
    assert invariant_sums or alone or not plan.batch_invariant, "bits depend on the ranks"
    outputs = spec.outputs or Span.whole(spec.hidden_size)
    return Build(
        plan,
        Ops(plan),
        ranks,
        RowParallel(ranks, invariant_sums, outputs),
        Ropes(spec, plan.max_model_len, plan.device.torch),
    )


@dataclass(slots=True)
class Last:
    """The step launched before this one."""

    handle: StepHandle | None = None
    places: dict[int, int] = field(default_factory=dict)
    """Where each request's token is among those sampled."""


class Runner:
    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        decoder: Decoder,
        capture: Capture | None = None,
        *,
        rank: int = 0,
    ) -> None:
        """`capture`: how decode steps are captured, instead of the plan's way."""
        self.spec, self.plan, self.decoder = spec, plan, decoder
        self.sampling = plan.sampling
        self.caches = Caches(plan, len(spec.layers))
        self.inputs = Inputs(plan, self.caches)
        self.sampling_states: dict[int, SamplingState] = {}
        most = plan.limits.max_num_seqs * (1 + plan.limits.num_draft_tokens)
        self.drawn = torch.zeros(most, dtype=torch.long, device=plan.device.torch)
        """The tokens of the last step, in the order of its samples."""
        self.masks = TokenMasks(spec.vocab.total, plan.device.torch)
        self.last = Last()
        self.recorded: list[RecordedChoices] | None = None
        """Set to a list to record every step's choices."""
        self.forced: list[RecordedChoices] | None = None
        """Choices to take instead, step by step."""
        self.probe: Callable[[Batch, Tensor], None] | None = None
        """Set by checks: sees the logits of every token of every step."""
        capture = capture or capture_for(plan)
        self.graphs = DecodeGraphs(self.inputs, decoder, self.drawn, capture) if capture else None
        self.canaries = (
            Canaries(plan, self.caches, rank=rank, padded=self.graphs is not None)
            if plan.canaries
            else None
        )

    def admit(self, admission: Admission) -> None:
        if self.canaries is not None:
            self.canaries.admit(admission)
        self.sampling_states[admission.id] = SamplingState(
            params=admission.params,
            prompt_ids=admission.prompt_token_ids,
            output_ids=[],
            position=len(admission.prompt_token_ids),
            eos_ids=admission.eos_token_ids,
            seed=admission.seed,
            bad_words=admission.bad_word_ids,
            constrained=admission.constrained,
        )

    def constrain(self, id: int, guide: Guide) -> None:
        """A request that was admitted: this rank's draws follow the guide."""
        self.sampling_states[id].guide = guide

    def poison(self, unowned: Unowned) -> None:
        """NaN in what nobody owns."""
        self.caches.poison(unowned)
        if self.canaries is not None:
            self.canaries.poisoned(unowned)

    @torch.inference_mode()
    def last_check(self) -> None:
        """Raises CanaryHit."""
        if self.canaries is not None:
            self.canaries.last_check()

    def failed(self) -> None:
        """Called when launching a step has raised. The step after it may be scheduled already and
        take a token that this one was to sample: its row is dropped, so any token will do."""
        self.last = Last(places=defaultdict(int))
        if self.graphs is not None:
            self.graphs.fixed.forget()

    def batch(self, step: StepMessage) -> Batch:
        return build_batch(step, self.inputs.block_sizes)

    @torch.inference_mode()
    def launch(self, step: StepMessage) -> StepHandle:
        for ended in step.ended:
            self.sampling_states.pop(ended, None)
        if self.canaries is not None:
            self.canaries.launching(step)
        batch = self.batch(step)
        states = [self._sampling_state(point) for point in batch.samples]
        self._wait_for_outputs([state for state in states if state.needs_output_ids])
        sampled: SampledTokens | None = None
        logits: Tensor | None = None
        graph_rows: int | None = None
        if self.graphs is not None and self._capturable(batch):
            made = self.graphs.run(batch, states, self.last.places)
            hidden, logits, graph_rows = made.hidden, made.logits, made.key.size
            if all(state.is_plain for state in states):
                sampled = SampledTokens(made.tokens, made.bad, None)
        else:
            hidden = self._forward(batch)
            if states:
                logits = self.decoder.logits(hidden[self._sampled_at(batch)])
        if self.probe is not None:
            self.probe(batch, self.decoder.logits(hidden).cpu())
        if sampled is None and logits is not None:
            sampled = self._sample(logits, states)
            self.drawn[: len(states)] = sampled.tokens
        prompts = [self._score_prompt(hidden, scored) for scored in batch.scored]
        sequences = [self.sampling_states[point.id] for point in batch.samples]
        for point, sequence in zip(batch.samples, sequences, strict=True):
            sequence.position += not point.drafts  # one token is certain
        check = self.canaries.launched(graph_rows) if self.canaries is not None else None
        handle = StepHandle(
            batch.samples, sequences, sampled, prompts, check, self.spec.vocab.total
        )
        self.last = Last(handle, {point.id: i for i, point in enumerate(batch.samples)})
        return handle

    def _sampling_state(self, point: SamplingPoint) -> SamplingState:
        state = self.sampling_states[point.id]
        return state.after(point.drafts) if point.drafts else state

    def _wait_for_outputs(self, states: list[SamplingState]) -> None:
        """Wait for the step before where the sampling of these rows depends on which tokens came
        before, not only on how many (penalties, banned words, grammars)."""
        if self.last.handle is not None and any(state.num_unknown for state in states):
            self.last.handle.result()

    def _capturable(self, batch: Batch) -> bool:
        """Decode rows with as many tokens each, all of which sample. Choices that are recorded or
        forced do not pass through a graph."""
        free = self.recorded is None and self.forced is None
        captured = (1, 1 + self.plan.limits.num_draft_tokens)
        return free and batch.tokens_per_row in captured and len(batch.samples) == len(batch.tokens)

    def _tokens(self, batch: Batch) -> Tensor:
        """With those that the step before has drawn."""
        tokens = self.inputs.tensor(batch.tokens)
        if batch.carried:
            at = self.inputs.tensor([point.token for point in batch.carried])
            places = self.inputs.tensor([self.last.places[point.id] for point in batch.carried])
            tokens[at] = self.drawn[places]
        return tokens

    def _forward(self, batch: Batch) -> Tensor:
        recorded = RecordedChoices() if self.recorded is not None else None
        forced = self.forced.pop(0) if self.forced else None
        if forced is not None:  # layers take out of its list
            forced = RecordedChoices(forced.experts, list(forced.positions))
        step = self.inputs.build(batch, self._tokens(batch), recorded, forced)
        hidden = self.decoder.hidden(step, self.caches.views)
        if self.recorded is not None and recorded is not None:
            self.recorded.append(recorded)
        return hidden

    def _sampled_at(self, batch: Batch) -> Tensor:
        return self.inputs.tensor([point.token for point in batch.samples])

    def _sample(self, logits: Tensor, states: list[SamplingState]) -> SampledTokens:
        # what a guide needs is awaited here: the device has its forward pass to do meanwhile
        self._wait_for_outputs([state for state in states if state.guide is not None])
        mask = self.masks.of(states)
        sampled = self.sampling.sample(logits, build_rows(states, self.plan.device.torch, mask))
        asked = any(state.params.logprobs is not None for state in states)
        # every rank has drawn them from the same logits; one counts, whatever the ranks are
        tokens = self.decoder.collective.from_first(sampled.tokens)
        return SampledTokens(tokens, sampled.bad, sampled if asked else None)

    def _score_prompt(self, hidden: Tensor, scored: ScoredTokens) -> PromptScores:
        state = self.sampling_states[scored.id]
        asked = state.params.prompt_logprobs or 0
        top = sys.maxsize if asked == -1 else asked
        rows = hidden[scored.tokens]
        found = PromptScores(scored.row, top)
        for start in range(0, len(rows), SCORED_ROWS):
            logits = self.decoder.logits(rows[start : start + SCORED_ROWS])
            at = scored.start + start + 1
            targets = list(state.prompt_ids[at : at + len(logits)])
            found.add(targets, self.sampling.score(logits, self.inputs.tensor(targets), top))
        return found
