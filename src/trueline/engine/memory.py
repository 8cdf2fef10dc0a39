"""What steps need of a GPU's memory beside weights and caches: measured, by running the largest
ones over a cache just large enough for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trueline.cache.slots import StateSlots
from trueline.engine.batch import Batch, build_batch
from trueline.engine.caches import Caches
from trueline.engine.inputs import Inputs
from trueline.engine.messages import StepMessage, StepRow
from trueline.engine.params import SamplingParams
from trueline.layers.decoder import Decoder
from trueline.ops.sampling import SamplingState, build_rows
from trueline.plan.memory import GroupPlan, Measured, SlotPlan
from trueline.plan.plan import Plan
from trueline.spec.model import ModelSpec

# A context whose attention takes all the workspace there is.
LONG = 32_768
# For what allocators lose between their blocks.
SLACK = 512 << 20


def measure(spec: ModelSpec, plan: Plan, decoder: Decoder) -> Measured:
    """After the weights have been loaded."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    prefill = max(_peak(spec, plan, decoder, _prefill(plan, most)) for most in _contexts(plan))
    decode = _peak(spec, plan, decoder, _decode(plan)) if plan.graphs else 0
    torch.cuda.empty_cache()
    return Measured(total - free, prefill + decode + SLACK)


@torch.inference_mode()
def _peak(spec: ModelSpec, plan: Plan, decoder: Decoder, batch: Batch) -> int:
    slots = replace(plan.slots, num_slots=len(batch.rows) + 1) if plan.slots else None
    groups = tuple(
        replace(group, num_blocks=2 + max(max(row.tables[number]) for row in batch.rows))
        for number, group in enumerate(plan.groups)
    )
    caches = Caches(replace(plan, groups=groups, slots=slots), len(spec.layers))
    for group in groups:
        for kind in group.kinds:
            caches.paged[kind.name].randomise(range(group.num_blocks))
    inputs = Inputs(plan, caches)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    hidden = decoder.hidden(inputs.build(batch, inputs.tensor(batch.tokens)), caches.views)
    logits = decoder.logits(hidden[: plan.limits.max_num_seqs])
    del hidden
    plan.sampling.sample(logits, build_rows(_rows(len(logits)), plan.device.torch))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _rows(count: int) -> list[SamplingState]:
    """As much to do as sampling may have: all tokens sorted, edited and reported."""
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=20)
    return [
        SamplingState(
            params=params, prompt_ids=[0, 1], output_ids=[], position=2, eos_ids=[], seed=seed
        )
        for seed in range(count)
    ]


def _contexts(plan: Plan) -> list[int]:
    """How much may be cached before a step's tokens."""
    count = plan.limits.max_num_batched_tokens
    others = {each for kind in plan.kinds for each in kind.costly_contexts(count)}
    return [LONG, *(min(each, LONG) for each in sorted(others))]


def _prefill(plan: Plan, most: int) -> Batch:
    """One request's, as long as a step may be, over a context of at most so many cached."""
    count = min(plan.limits.max_num_batched_tokens, plan.max_model_len)
    start = min(plan.max_model_len - count, most)
    return made_up_batch(plan, [(start, count)])


def _decode(plan: Plan) -> Batch:
    drafts = plan.limits.num_draft_tokens
    start = min(plan.max_model_len - 1 - drafts, LONG)
    return made_up_batch(plan, [(start, 1)] * plan.limits.max_num_seqs, num_drafts=drafts)


def made_up_batch(
    plan: Plan, rows: Sequence[tuple[int, int]], *, num_drafts: int = 0, spread: bool = False
) -> Batch:
    """Rows as (start, known tokens); decode rows have drafts as well. They share a few blocks, or
    are spread over the whole cache."""
    made = []
    for number, (start, known) in enumerate(rows):
        is_decode = known == 1 and start > 0
        count = known + num_drafts * is_decode
        made.append(
            StepRow(
                id=0,
                start=start,
                token_ids=[0] * count,
                tables=[
                    _table(plan, group, start + count, number if spread else None)
                    for group in plan.groups
                ],
                is_decode=is_decode,
                samples=is_decode,
                num_drafts=count - known,
                state=_slots(plan.slots, number, start, count - known, spread),
            )
        )
    return build_batch(StepMessage(rows=made), [group.block_size for group in plan.groups])


def _table(plan: Plan, group: GroupPlan, num_positions: int, row: int | None) -> list[int]:
    each = -(-num_positions // group.block_size)
    if row is None:
        tokens = plan.limits.max_num_batched_tokens
        if group.keeps_ends:
            tokens = min(tokens, group.window or tokens)
        few = -(-tokens // group.block_size)
        return [1 + i % few for i in range(each)]
    return [1 + (row * each + i) % (group.num_blocks - 1) for i in range(each)]


def _slots(
    plan: SlotPlan | None, row: int, start: int, num_drafts: int, spread: bool
) -> StateSlots | None:
    """Of its own; over the whole cache, as far as there are enough."""
    if plan is None:
        return None
    slot = 1 + (row % (plan.num_slots - 1) if spread else row)
    return StateSlots(slot, slot if start else None, (), (slot,) * num_drafts)
