"""What steps need of a GPU's memory beside weights and caches: measured, by running the largest
ones over a cache just large enough for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.engine.batch import Batch, build_batch
from trueline.engine.caches import Caches
from trueline.engine.inputs import Inputs
from trueline.engine.messages import StepMessage, StepRow
from trueline.engine.params import SamplingParams
from trueline.engine.step import StateSlots
from trueline.layers.decoder import Decoder
from trueline.ops.mla_prefill import masked_context
from trueline.ops.sampling import SamplingState, build_rows
from trueline.plan.memory import Measured
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
    blocks = 2 + max(map(max, batch.blocks))
    slots = replace(plan.slots, num_slots=len(batch.rows) + 1) if plan.slots else None
    groups = tuple(replace(group, num_blocks=blocks) for group in plan.groups)
    caches = Caches(replace(plan, groups=groups, slots=slots), len(spec.layers))
    for store in caches.paged.values():
        store.randomise(range(blocks))
    inputs = Inputs(plan, decoder.ops, caches)
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
    """As much to do as sampling may have: all tokens sorted, edited and told of."""
    params = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=20)
    return [SamplingState(params, [0, 1], [], 2, [], seed) for seed in range(count)]


def _contexts(plan: Plan) -> list[int]:
    """How much may be cached before a step's tokens; with an indexer, prefill has another way of
    attending over contexts that are not so long."""
    latent, index = plan.kind(Latent), plan.kind(IndexKeys)
    if latent is None or index is None:
        return [LONG]
    nope, value = latent.mixer.qk_nope_head_dim, latent.mixer.v_head_dim
    count = plan.limits.max_num_batched_tokens
    longest = masked_context(latent.layout, nope, value, index.topk, count)
    return [LONG, min(max(longest - count, 0), LONG)]


def _prefill(plan: Plan, most: int) -> Batch:
    """One request's, as long as a step may be, over a context of at most so many cached."""
    count = min(plan.limits.max_num_batched_tokens, plan.max_model_len)
    start = min(plan.max_model_len - count, most)
    return made_up_batch(plan, [(start, count)])


def _decode(plan: Plan) -> Batch:
    start = min(plan.max_model_len - 1, LONG)
    return made_up_batch(plan, [(start, 1)] * plan.limits.max_num_seqs)


def made_up_batch(plan: Plan, rows: Sequence[tuple[int, int]]) -> Batch:
    """Rows that share the blocks of a made-up request."""
    size = plan.block_size
    # The same few blocks again and again: what is in them does not matter.
    few = -(-plan.limits.max_num_batched_tokens // size)
    made = [
        StepRow(
            id=0,
            start=start,
            token_ids=[0] * count,
            tables=[[1 + i % few for i in range(-(-(start + count) // size))]],
            is_decode=count == 1 and start > 0,
            samples=False,
            state=StateSlots(number, number if start else None) if plan.slots else None,
        )
        for number, (start, count) in enumerate(rows, 1)
    ]
    latent, index = plan.kind(Latent), plan.kind(IndexKeys)
    assert latent is not None, "the plan refuses other models"
    topk = index.topk if index else None
    step = StepMessage(rows=made)
    return build_batch(step, latent.layout, one_form=plan.batch_invariant, topk=topk)
