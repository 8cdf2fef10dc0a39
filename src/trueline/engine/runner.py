"""Executes batches, one after the other, on one rank: forward, logits, sampling.

A step is launched, and its result fetched later: on a GPU the host does not wait in between. So
what depends on token values of steps not yet fetched lives here: the tokens drawn last, on the
device, and each request's outputs so far.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.engine.batch import Batch, ScoredPrompt
from trueline.engine.graphs import Capture, DecodeGraphs, capture_for
from trueline.engine.inputs import Caches, Inputs
from trueline.engine.messages import CoreRequest
from trueline.engine.results import Drawn, Pending, PromptScores, Story
from trueline.layers.context import Build, Ops, Parameters, StepInput, Weights
from trueline.layers.decoder import Decoder, Replay
from trueline.ops.sampling import RowState, build_rows
from trueline.parallel.collective import Collective, Solo, Sums
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec
from trueline.spec.shard import whole_spec

# Prompt positions whose logits are held at a time.
SCORED_ROWS = 256


def build_decoder(
    spec: ModelSpec, plan: Plan, values: Parameters, collective: Collective | None = None
) -> Decoder:
    """The layers with their weights, on the plan's device."""
    ranks, whole = collective or Solo(), spec.outputs is not None
    alone = spec == whole_spec(spec)
    assert whole or alone or not plan.batch_invariant, "sums in parts: bits depend on the ranks"
    build = Build(plan, Ops(plan), ranks, Sums(ranks, whole))
    weights = Weights(values, plan.compute_dtype, plan.device.torch)
    return Decoder(spec, build, weights)


@dataclass(slots=True)
class Last:
    """The step launched before this one."""

    pending: Pending | None = None
    places: dict[str, int] = field(default_factory=dict)
    """Where each request's token is among those drawn."""


class Runner:
    def __init__(
        self, spec: ModelSpec, plan: Plan, decoder: Decoder, capture: Capture | None = None
    ) -> None:
        """`capture`: how decode steps are captured, instead of the plan's way."""
        self.spec, self.plan, self.decoder = spec, plan, decoder
        self.sampling = plan.op("sampling")
        self.caches = Caches(spec, plan)
        self.inputs = Inputs(spec, plan, decoder.ops, self.caches)
        self.stories: dict[str, Story] = {}
        device = plan.device.torch
        self.drawn = torch.zeros(plan.limits.max_num_seqs, dtype=torch.long, device=device)
        """The tokens of the last step, in the order of its samples."""
        self.last = Last()
        self.recorded: list[Replay] | None = None
        """Set to a list to record every step's choices."""
        self.forced: list[Replay] | None = None
        """Choices to take instead, step by step."""
        self.probe: Callable[[Batch, Tensor], None] | None = None
        """Set by checks: sees the logits of every token of every step."""
        capture = capture or capture_for(plan)
        self.graphs = DecodeGraphs(self.inputs, decoder, self.drawn, capture) if capture else None

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

    def failed(self) -> None:
        """The step that was to be launched now. One after it may be on its way already and want a
        token that was to be drawn: its row ends with this step's, so any token will do."""
        self.last = Last(places=defaultdict(int))
        if self.graphs is not None:
            self.graphs.fixed.forget()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Pending:
        for name in batch.forget:
            self.stories.pop(name, None)
        self._wait_for_outputs(batch)
        names = [name for _, name in batch.samples]
        stories = [self.stories[name] for name in names]
        drawn: Drawn | None = None
        logits: Tensor | None = None
        if self.graphs is not None and self._capturable(batch):
            made = self.graphs.run(batch, [story.row for story in stories], self.last.places)
            hidden, logits = made.hidden, made.logits
            if all(story.row.is_plain for story in stories):
                drawn = Drawn(made.tokens, made.bad, None)
        else:
            hidden = self._forward(batch)
            if names:
                logits = self.decoder.logits(hidden[self._sampled_at(batch)])
        if self.probe is not None:
            self.probe(batch, self.decoder.logits(hidden).cpu())
        if drawn is None and logits is not None:
            drawn = self._draw(logits, [story.row for story in stories])
            self.drawn[: len(names)] = drawn.tokens
        for story in stories:
            story.row.position += 1
        prompts = [self._score_prompt(hidden, wanted) for wanted in batch.scored]
        pending = Pending(names, stories, drawn, prompts)
        self.last = Last(pending, {name: i for i, name in enumerate(names)})
        return pending

    def _wait_for_outputs(self, batch: Batch) -> None:
        """Some rows must know which tokens came before, not only how many."""
        rows = (self.stories[name].row for _, name in batch.samples)
        if self.last.pending is not None and any(row.needs_output_ids for row in rows):
            self.last.pending.result()

    def _capturable(self, batch: Batch) -> bool:
        """One token for every row, and nothing to see but what is drawn. Choices that are recorded
        or forced do not pass through a graph."""
        free = self.recorded is None and self.forced is None
        return free and batch.num_decode_rows == len(batch.rows) == len(batch.samples)

    def _tokens(self, batch: Batch) -> Tensor:
        """With those that the step before has drawn."""
        tokens = self.inputs.tensor(batch.tokens)
        if batch.carried:
            at = self.inputs.tensor([index for index, _ in batch.carried])
            places = self.inputs.tensor([self.last.places[name] for _, name in batch.carried])
            tokens[at] = self.drawn[places]
        return tokens

    def _forward(self, batch: Batch) -> Tensor:
        recorded = Replay() if self.recorded is not None else None
        forced = self.forced.pop(0) if self.forced else None
        step: StepInput = self.inputs.build(
            batch, self._tokens(batch), forced.positions if forced else ()
        )
        hidden = self.decoder.hidden(step, self.caches.views, recorded, forced)
        if self.recorded is not None and recorded is not None:
            recorded.positions = step.sparse.recorded if step.sparse else []
            self.recorded.append(recorded)
        return hidden

    def _sampled_at(self, batch: Batch) -> Tensor:
        return self.inputs.tensor([index for index, _ in batch.samples])

    def _draw(self, logits: Tensor, rows: list[RowState]) -> Drawn:
        sampled = self.sampling.sample(logits, build_rows(rows, self.plan.device.torch))
        asked = any(row.params.logprobs is not None for row in rows)
        return Drawn(sampled.tokens, sampled.bad, sampled if asked else None)

    def _score_prompt(self, hidden: Tensor, wanted: ScoredPrompt) -> PromptScores:
        request = self.stories[wanted.request_id].request
        asked = request.params.prompt_logprobs or 0
        top = sys.maxsize if asked == -1 else asked
        rows = hidden[wanted.tokens]
        found = PromptScores(wanted.request_id, wanted.start, top)
        for start in range(0, len(rows), SCORED_ROWS):
            logits = self.decoder.logits(rows[start : start + SCORED_ROWS])
            at = wanted.start + start + 1
            targets = request.prompt_token_ids[at : at + len(logits)]
            found.add(targets, self.sampling.score(logits, self.inputs.tensor(targets), top))
        return found
