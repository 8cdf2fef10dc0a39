"""A batch as what layers take: tensors on the plan's device, and what each op made of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.device import send
from trueline.engine.batch import Batch
from trueline.engine.caches import Caches
from trueline.layers.context import Ops, PrefillSlice, Selected, SparseStep, StateStep, StepInput
from trueline.ops.capabilities import HeadDims, Opaque
from trueline.ops.lightning import StateTable
from trueline.ops.mla_prefill import FEW, PrefillRow, masked_context
from trueline.ops.sparse_rows import Run, SparseRows
from trueline.plan.plan import Plan

# Scores of index keys that are held at a time.
SCORES_AT_A_TIME = 1 << 25


class Inputs:
    def __init__(self, plan: Plan, ops: Ops, caches: Caches) -> None:
        self.plan, self.ops, self.caches = plan, ops, caches
        latent, index = plan.kind(Latent), plan.kind(IndexKeys)
        assert latent is not None, "the plan refuses other models"
        self.latent, self.mixer = latent, latent.mixer
        self.heads, self.head_dims = self.mixer.heads.count, HeadDims.of(self.mixer)
        self.topk = index.topk if index else None

    def build(self, batch: Batch, tokens: Tensor, forced: Sequence[Tensor] = ()) -> StepInput:
        """`tokens` are the batch's, with those in it that steps in flight have drawn. `forced`:
        selections to take instead, layer by layer."""
        prepared = None
        if batch.decode.lengths:
            prepared = self.ops.mla_decode.prepare(
                batch.decode, self.caches.first(Latent), self.plan.tiling, self.heads
            )
        return StepInput(
            tokens,
            self.tensor(batch.positions),
            self.tensor(batch.cells),
            batch.decode,
            self._places(batch.decode_tokens),
            self._prefill(tuple(PrefillSlice(at, row) for at, row in batch.prefill)),
            prepared,
            self._state_step(batch),
            self._sparse_step(batch, forced),
        )

    def _prefill(self, parts: Sequence[PrefillSlice]) -> Opaque | None:
        if not parts:
            return None
        view, decode = self.caches.first(Latent), self.ops.mla_decode
        return self.ops.mla_prefill.prepare(parts, view, self.head_dims, decode)

    def tensor(self, values: Sequence[int]) -> Tensor:
        """On the device; the host does not wait for it."""
        return send(torch.tensor(values, dtype=torch.long), self.plan.device.torch)

    def _places(self, tokens: list[int]) -> slice | Tensor:
        """A slice where they follow each other, as without an indexer they always do."""
        if tokens == list(range(len(tokens))):
            return slice(0, len(tokens))
        return self.tensor(tokens)

    def _sparse_step(self, batch: Batch, forced: Sequence[Tensor]) -> SparseStep | None:
        ops = self.ops.sparse
        if not batch.sparse_tokens or self.topk is None or ops is None:
            return None
        rows, tiling, topk = batch.sparse, self.plan.tiling, self.topk
        keys = self.caches.first(IndexKeys)
        selected, masked = self._split(batch, topk)
        return SparseStep(
            self._places(batch.sparse_tokens),
            self.tensor(rows.lengths),
            tuple(
                (at, ops.index_scores.prepare(part, keys, tiling, topk=topk))
                for at, part in rows.parts(SCORES_AT_A_TIME)
            ),
            selected,
            self._masked(masked),
            list(forced),
        )

    def _masked(self, parts: Sequence[PrefillSlice]) -> Opaque | None:
        if not parts:
            return None
        assert self.ops.masked_prefill is not None
        view = self.caches.first(Latent)
        return self.ops.masked_prefill.prepare_chosen(parts, view, self.head_dims)

    def _split(self, batch: Batch, topk: int) -> tuple[Selected | None, tuple[PrefillSlice, ...]]:
        """Runs of many tokens whose context is not much longer than what they choose attend over
        all of it, if there is an op for it; the others over lists."""
        masked: list[PrefillSlice] = []
        rows: list[int] = []
        runs: list[Run] = []
        row = 0
        for run in batch.sparse.runs:
            if self._attends_masked(run, topk):
                token = batch.sparse_tokens[row]
                part = PrefillRow(run.first - 1, run.count, run.block_ids)
                masked.append(PrefillSlice(slice(token, token + run.count), part, row))
            else:
                rows += range(row, row + run.count)
                runs.append(run)
            row += run.count
        if not runs:
            return None, tuple(masked)
        view, tiling = self.caches.first(Latent), self.plan.tiling
        assert self.ops.sparse is not None
        prepared = self.ops.sparse.sparse_mla.prepare(SparseRows(tuple(runs)), view, tiling)
        at = self._places([batch.sparse_tokens[row] for row in rows])
        return Selected(at, self._places(rows), len(rows), prepared), tuple(masked)

    def _attends_masked(self, run: Run, topk: int) -> bool:
        if run.count <= FEW or self.ops.masked_prefill is None:
            return False
        nope, value = self.mixer.qk_nope_head_dim, self.mixer.v_head_dim
        longest = masked_context(self.latent.layout, nope, value, topk, run.count)
        return not self.plan.batch_invariant and run.first + run.count - 1 <= longest

    def _state_step(self, batch: Batch) -> StateStep | None:
        if self.ops.recurrent is None:
            return None
        lightning = self.ops.recurrent.lightning
        count = batch.num_decode_rows
        decode = [row for _, row in batch.states[:count]]
        on_gpu = self.plan.device.is_gpu
        rows = StateTable.of(decode, self.plan.device.torch) if on_gpu else decode
        prefill = batch.states[count:]
        return StateStep(
            count,
            lightning.prepare(rows) if decode else None,
            lightning.prepare_prefill(prefill) if prefill else None,
        )
