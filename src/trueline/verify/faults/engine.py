"""Mistakes in the running engine, caught by its invariants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trueline.cache.kinds.latent import Latent, LatentInputs
from trueline.cache.pool import Pool
from trueline.cache.store import LatentView
from trueline.engine import batch, live_request
from trueline.engine import runner as runner_module
from trueline.engine.batch import Batch
from trueline.engine.live_request import LiveRequest
from trueline.engine.request import Request
from trueline.engine.scheduler import Scheduler
from trueline.engine.step import Row
from trueline.layers.context import StepInput
from trueline.layers.decoder import Decoder
from trueline.layers.feedforward import MoE
from trueline.layers.mla import MLA
from trueline.ops.mla_decode import cpu as decode
from trueline.ops.mla_prefill import cpu as prefill
from trueline.ops.sampling import cpu as sampling
from trueline.ops.sampling.rows import SamplingRows, SamplingState
from trueline.spec.feedforward import RouterSpec
from trueline.verify.faults import Fault, Make, Running

Part = tuple[Tensor, Tensor]
"""Outputs and their LSE."""


def _base_2(softmax_part: Make) -> Make:
    def broken(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = softmax_part(*arguments, **options)
        return out, lse / math.log(2)

    return broken


def _swapped_lse(merge: Make) -> Make:
    """[heads, queries] read as [queries, heads]: same count, so no shape error."""

    def broken(a: Part, b: Part, *rest: Part) -> object:
        flipped = a[1].reshape(-1)[: b[1].numel()].reshape(b[1].T.shape).T
        return merge((a[0], flipped), b, *rest)

    return broken


def _empty_counts(softmax_part: Make) -> Make:
    """An empty set of keys gets a sum of one instead of none."""

    def broken(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        out, lse = softmax_part(*arguments, **options)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    return broken


def _unmasked(prepare: Make) -> Make:
    """Every row sees as far as the longest of its group."""

    def broken(*arguments: object) -> object:
        made = prepare(*arguments)
        if isinstance(made, list):
            return [replace(group, beyond=None) for group in made]
        return replace(made, lengths=made.lengths.max().expand(len(made.lengths)).contiguous())

    return broken


def _stranger_cells(prepare: Make) -> Make:
    """Beyond a row's end the null block is read, and relied on to be zero."""

    def broken(rows: object, view: LatentView, tiling: object, heads: int) -> object:
        made = prepare(rows, view, tiling, heads)
        if isinstance(made, list):
            return [
                replace(group, cells=group.cells.masked_fill(group.cells == view.zero_cell, 0))
                for group in made
            ]
        # whole blocks: where one row has fewer of them, the table is filled up with the null block
        whole = made.block_ids.shape[1] * view.layout.block_size
        return replace(made, lengths=torch.full_like(made.lengths, whole))

    return broken


def _short_table(cells: Make) -> Make:
    """The last, partly filled block is left out."""

    def broken(size: int, blocks: list[int], start: int, stop: int) -> list[int]:
        last = max(len(blocks) - 2, 0)
        return [blocks[min(p // size, last)] * size + p % size for p in range(start, stop)]

    return broken


def _causal_off_by_one(hide: Make) -> Make:
    return lambda scores, first_query, first_key: hide(scores, first_query + 1, first_key)


def _later_keys_replace(merge: Make) -> Make:
    """What a later run of keys gives replaces what the runs before gave."""
    return lambda a, b, *rest: b


def _decode_rows_last(forward: Make) -> Make:
    """Decode rows taken from the end, as if prefill came first (story 2)."""

    def broken(self: MLA, q: Tensor, step: object, view: object) -> Tensor:
        return torch.roll(forward(self, q, step, view), 1, 0)

    return broken


def _tail_fed_with_a_guess(step_row: Make) -> Make:
    """A one-token tail of a prompt is taken for generation and fed the token sampled last."""

    def broken(self: LiveRequest, row: Row) -> object:
        made = step_row(self, row)
        if row.count == 1 and 0 < row.start < self.num_prompt_tokens:
            made.token_ids[0] = self.tokens[row.start - 1]
        return made

    return broken


def _positions_from_zero(batch: Make) -> Make:
    """After a prefix hit positions start again at zero."""

    def broken(self: object, step: object) -> object:
        made = batch(self, step)
        seen = vars(self).setdefault("seen_before", set())
        for row in made.rows:
            if row.start and row.id not in seen:
                made.positions[row.tokens] = range(row.tokens.stop - row.tokens.start)
            seen.add(row.id)
        return made

    return broken


def _stale_token(tokens: Make) -> Make:
    """The loop ahead feeds the token before the last one."""

    def broken(self: runner_module.Runner, batch: Batch) -> object:
        made = tokens(self, batch)
        for point in batch.carried:
            outputs = self.sampling_states[point.id].output_ids
            made[point.token] = outputs[-2] if len(outputs) > 1 else outputs[-1]
        return made

    return broken


def _key_written_unrotated(write: Make) -> Make:
    return lambda self, cells, latent, rope: write(self, cells, latent, rope.roll(1, -1))


def _last_row_not_written(write: Make) -> Make:
    def broken(self: LatentView, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        keep = slice(0, -1) if len(cells) > 1 else slice(None)
        write(self, cells[keep], latent[keep], rope[keep])

    return broken


def _weights_in_other_order(run: Make) -> Make:
    """Weights sorted by size, ids not."""

    def broken(x: object, ids: Tensor, weights: Tensor, *rest: object, **options: object) -> object:
        return run(x, ids, weights.sort(-1).values, *rest, **options)

    return broken


def _scaled(run: Make) -> Make:
    def broken(
        logits: object, bias: object, router: RouterSpec, forced: object = None
    ) -> tuple[Tensor, Tensor]:
        ids, weights = run(logits, bias, router, forced)
        return ids, weights * router.scaling_factor

    return broken


def _biased(run: Make) -> Make:
    def broken(
        logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: object = None
    ) -> tuple[Tensor, Tensor]:
        ids, _ = run(logits, bias, router, forced)
        scores = logits.sigmoid() if bias is None else logits.sigmoid() + bias
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * router.scaling_factor

    return broken


def _shared_dropped(forward: Make) -> Make:
    def broken(self: MoE, x: Tensor, forced: object) -> object:
        shared, self.shared = self.shared, None if len(x) > 8 else self.shared
        try:
            return forward(self, x, forced)
        finally:
            self.shared = shared

    return broken


def _no_chain(hash_blocks: Make) -> Make:
    """A block is named by its own tokens alone."""

    def broken(tokens: Sequence[int], size: int, salt: bytes, previous: object) -> list[bytes]:
        return [
            hash_blocks(tokens[start : start + size], size, salt, [])[0]
            for start in range(0, len(tokens) - size + 1, size)
        ]

    return broken


def _release_at_once(release: Make) -> Make:
    """Shared blocks are freed by the first who leaves."""

    def broken(self: Pool, ids: Iterable[int]) -> None:
        for block in ids:
            while self.references(block) > 1:
                release(self, [block])
        release(self, ids)

    return broken


def _resumes_too_far(seat: Make) -> Make:
    """A preempted request comes back with one block more than it has."""

    def broken(self: Scheduler, request: Request, prefix: object, fresh: object) -> None:
        seat(self, request, prefix, fresh)
        if request.num_admissions > 1:
            request.num_computed += self.blocks.lcm_block_size

    return broken


def _evicted_still_named(take: Make) -> Make:
    """A block that another request was given can still be found by the hash of its old contents."""

    def broken(self: Pool) -> int:
        before = dict(self._place_of)
        block: int = take(self)
        self._place_of.update({k: v for k, v in before.items() if v == block})
        for value in [k for k, v in self._place_of.items() if v == block]:
            self._hash_of[block] = value
        return block

    return broken


def _seed_of_place(build_rows: Make) -> Make:
    def broken(states: Sequence[SamplingState], *rest: object) -> SamplingRows:
        rows: SamplingRows = build_rows(states, *rest)
        return replace(rows, seed=rows.seed + torch.arange(len(states)))

    return broken


def _same_draw_everywhere(build_rows: Make) -> Make:
    def broken(states: Sequence[SamplingState], *rest: object) -> SamplingRows:
        rows: SamplingRows = build_rows(states, *rest)
        return replace(rows, seed=torch.zeros_like(rows.seed))

    return broken


def _scores_after_bias(sample: Make) -> Make:
    def broken(logits: Tensor, rows: SamplingRows) -> object:
        edited = logits.clone()
        if rows.bias is not None:
            edited[rows.bias.row, rows.bias.token] += rows.bias.value.float()
        return sample(edited, replace(rows, bias=None))

    return broken


def _product_of_the_count(run: Make) -> Make:
    """The last bit of a head's GEMM depends on how many rows share it, as it does in some
    libraries' kernels."""
    return lambda x, packed, to=None: run(x, packed, to).mul_(1 + 2.0**-22 * (len(x) % 7))


def _one_form_forgotten(init: Make) -> Make:
    def broken(self: LatentInputs, *given: object) -> None:
        init(self, *given)
        self.context = replace(self.context, batch_invariant=False)

    return broken


def _rope_ahead(hidden: Make) -> Make:
    """Decode rows take the rope of the position after theirs."""

    def broken(self: Decoder, step: StepInput, *rest: object) -> object:
        shifted = step.positions.clone()
        decode = step[Latent].decode
        if decode is not None:
            shifted[decode.at] += 1
        return hidden(self, replace(step, positions=shifted), *rest)

    return broken


_M = "v3-near"

ENGINE_FAULTS = [
    Fault("lse-base-2", "log-sum-exp in base 2, merged as if natural", "op = reference", _M,
          decode, "softmax_part", _base_2),
    Fault("lse-layout", "lse of [heads, queries] read transposed", "op = reference", _M,
          prefill, "merge", _swapped_lse),
    Fault("empty-set-counts", "a row without keys is not -inf", "op = reference", _M,
          decode, "softmax_part", _empty_counts),
    Fault("ragged-unmasked", "a row sees as far as the longest beside it", "solo = batch", _M,
          Running("mla_decode"), "prepare", _unmasked),
    Fault("null-block-read", "masked positions read the null block", "poison", _M,
          Running("mla_decode"), "prepare", _stranger_cells),
    Fault("last-block", "the last block of a sequence is addressed wrongly", "engine oracle", _M,
          batch, "cells", _short_table),
    Fault("causal-off-by-one", "a query sees the key after it", "engine oracle", _M,
          prefill, "_hide_later", _causal_off_by_one),
    Fault("runs-not-merged", "the last run of keys replaces those before", "op = reference", _M,
          prefill, "merge", _later_keys_replace),
    Fault("decode-rows-shifted", "decode rows indexed as prefill rows (story 2)", "solo = batch",
          _M, MLA, "_decode", _decode_rows_last),
    Fault("one-token-tail", "the tail of a prompt is fed a guess", "split = whole", _M,
          LiveRequest, "step_row", _tail_fed_with_a_guess),
    Fault("hit-positions", "positions restart after a prefix hit", "prefix = cold", _M,
          runner_module.Runner, "batch", _positions_from_zero),
    Fault("stale-token", "one step ahead, the token before is fed", "overlapped = plain", _M,
          runner_module.Runner, "_tokens", _stale_token),
    Fault("key-permuted", "the cached key has other channels than the query", "engine oracle", _M,
          LatentView, "write", _key_written_unrotated),
    Fault("row-not-written", "the last row of a chunk is not cached", "split = whole", _M,
          LatentView, "write", _last_row_not_written),
    Fault("decode-rope-ahead", "decode takes the next position's rope", "engine oracle", _M,
          Decoder, "hidden", _rope_ahead),
    Fault("engine-scaling-twice", "routed_scaling_factor applied twice", "engine oracle", _M,
          Running("route"), "run", _scaled),
    Fault("engine-bias-in-weights", "the correction bias in the weights", "engine oracle", _M,
          Running("route"), "run", _biased),
    Fault("expert-weights-order", "expert weights in another order than ids", "engine oracle", _M,
          Running("experts"), "run", _weights_in_other_order),
    Fault("shared-expert-in-large-steps", "the shared expert is left out of large steps",
          "split = whole", _M, MoE, "forward", _shared_dropped),
    Fault("prefix-not-chained", "a block is named by its own tokens alone", "prefix = cold", _M,
          live_request, "hash_blocks", _no_chain),
    Fault("freed-while-shared", "a shared block is freed by the first who leaves",
          "prefix = cold", _M, Pool, "release", _release_at_once),
    Fault("resumes-too-far", "a preempted request skips what it lost", "preempt = resume", _M,
          Scheduler, "_seat", _resumes_too_far),
    Fault("evicted-still-named", "a block's old contents can be hit after its reuse",
          "steady state", _M, Pool, "_take", _evicted_still_named),
    Fault("seed-of-place", "a draw depends on the row's place", "seeded draws", _M,
          runner_module, "build_rows", _seed_of_place),
    Fault("seed-ignored", "seeds are ignored", "seeded draws", _M,
          runner_module, "build_rows", _same_draw_everywhere),
    Fault("logprobs-after-bias", "logprobs after bias instead of raw", "raw logprobs", _M,
          sampling, "sample", _scores_after_bias),
    Fault("unsteady-heads", "a head's GEMM depends on the number of rows", "batch-invariant",
          _M, Running("batched_gemm"), "run", _product_of_the_count),
    Fault("two-forms", "prefill and decode attend in different forms", "batch-invariant", _M,
          LatentInputs, "__init__", _one_form_forgotten),
]  # fmt: skip
