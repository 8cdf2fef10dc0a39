"""Compressed attention: one row per position is key and value of all heads; a query sees the last
ones, entries that compressors make of the others, and a sink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.entries import (
    Entries,
    EntriesAll,
    EntriesIndex,
    EntriesSparse,
    EntryInput,
)
from trueline.cache.kinds.tails import Tails, TailsAll, TailsIndex, TailsSparse
from trueline.cache.kinds.window import Window
from trueline.cache.store import LatentView
from trueline.device import Branch
from trueline.layers.context import ANYWHERE, Build, StepInput, Weights
from trueline.layers.entry_indexer import EntryIndexer
from trueline.layers.linear import WeightGemm
from trueline.layers.ropes import Rope, rows_of
from trueline.ops.capabilities import PUBLISHED, Opaque
from trueline.ops.sink_prepare import Rotation
from trueline.parallel.placement import Replicated, check_shape
from trueline.spec.mixer import CompressedSpec
from trueline.spec.rope import Pairing
from trueline.spec.source import Span

Rounded = Callable[[Tensor], Tensor]
"""Numerics `published`: of rows before they are kept."""


class Compressed:
    capabilities = replace(ANYWHERE, numerics=("weights", PUBLISHED))

    def __init__(self, spec: CompressedSpec, build: Build, weights: Weights, name: str) -> None:
        assert build.ops.compressed is not None, "the plan knows of compressed attention"
        self.spec, self.ops, self.op = spec, build.ops, build.ops.compressed
        self.row_parallel, rounding = build.row_parallel, self.op.row_rounding
        self.rounded = partial(rounding.key, rope=spec.rope.dim) if rounding else None
        q_a, kv = (weights.stored(f"{name}.{part}.weight") for part in ("q_a_proj", "kv_proj"))
        self.first = WeightGemm(build, q_a, kv)
        self.q_norm = weights.take(f"{name}.q_a_layernorm.weight")
        self.kv_norm = weights.take(f"{name}.kv_norm.weight")
        self.q_b = WeightGemm(build, weights.stored(f"{name}.q_b_proj.weight"))
        self.sinks = weights.take(f"{name}.sinks").float()
        check_shape(f"{name}.sinks", tuple(self.sinks.shape), spec.heads.count)
        groups, rank = spec.o_groups, spec.o_lora_rank
        o_a = weights.stored(f"{name}.o_a_proj.weight")
        width = spec.heads.total // groups.total * spec.head_dim
        check_shape(f"{name}.o_a_proj", o_a.shape, groups.count * rank, width)
        self.o_a = build.ops.batched_gemm.pack(
            o_a.stacked(groups.count), build.ops.linear, build.plan.batch_invariant
        )
        o_b = weights.stored(f"{name}.o_b_proj.weight")
        build.row_parallel.check(f"{name}.o_b_proj", o_b.shape, groups, rank)
        self.o_b = WeightGemm(build, o_b)
        self.compressor: Compressor | None = None
        self.entries: type[Entries] = EntriesSparse if spec.form == "sparse" else EntriesAll
        if spec.compressor is not None:
            tails = TailsSparse if spec.form == "sparse" else TailsAll
            at = f"{name}.compressor"
            self.compressor = Compressor(spec, build, weights, at, tails, self.rounded)
            projections = [_projection(weights, at)]
            self.table = build.ropes.table(spec.rope)
        self.indexer: EntryIndexer | None = None
        if spec.indexer is not None:
            at = f"{name}.indexer"
            rounded = rounding.index if rounding else None
            self.index_keys = Compressor(
                spec, build, weights, f"{at}.compressor", TailsIndex, rounded
            )
            self.indexer = EntryIndexer(spec, build, weights, at)
            projections.append(_projection(weights, f"{at}.compressor"))
        if spec.compressor is not None:
            self.widths = [len(each) for each in projections]
            self.projection = build.ops.linear.pack(torch.cat(projections))

    def forward(self, x: Replicated, step: StepInput, views: LayerViews, rope: Rope) -> Replicated:
        assert rope is not None
        rotation = Rotation(*rope, self.spec.rope.pairing, self.ops.rope)
        if self.compressor is None:
            q_latent, q = self._write(x, step, views, rotation)
        else:
            branch = Branch()
            with branch:
                self._make_entries(self.compressor, x, step, views)
            q_latent, q = self._write(x, step, views, rotation)
            branch.join()
        out = self._attend(x, q_latent, q, step, views, rotation)
        out = self.op.sink_prepare.rotate(out, rope=rotation, back=True)
        groups: Span = self.spec.o_groups
        made = self.ops.batched_gemm.run(out.reshape(len(x), groups.count, -1), self.o_a)
        return self.row_parallel.run(made.flatten(1), self.o_b, groups)

    def _write(
        self, x: Tensor, step: StepInput, views: LayerViews, rope: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Each token's row goes to the window. Returns the latent of the queries, normed, and the
        queries [n, heads, head_dim], rotated."""
        op, eps, rms_norm = self.op.sink_prepare, self.spec.norm_eps, self.ops.rms_norm
        window, cells = views[Window], step[Window].cells
        into, at = window.scratch(len(x)) if self.rounded else (window, cells)
        q_latent = op.write(
            self.first(x),
            into,
            at,
            norms=(self.q_norm, self.kv_norm),
            eps=eps,
            rope=rope,
            rms_norm=rms_norm,
        )
        if self.rounded:
            _put(window, cells, self.rounded(into.rows[: len(x)]))
        q = self.q_b(q_latent).view(len(x), -1, self.spec.head_dim)
        return q_latent, op.queries(q, eps=eps, rope=rope, rms_norm=rms_norm)

    def _make_entries(
        self, compressor: Compressor, x: Tensor, step: StepInput, views: LayerViews
    ) -> None:
        """Those that the step completes; the indexer's keys too, where nobody chooses: later tokens
        may."""
        given = step[self.entries]
        if given.rope is None:
            given.rope = rows_of(self.table, given.positions)
        # kept in float32, so not rounded before
        both = self.ops.linear.run_wide(x, self.projection)
        projected = torch.split(both, self.widths, dim=1)
        at = step, views, given.rope
        compressor.write(projected[0], *at, views[self.entries], given.cells)
        if self.indexer is not None:
            self.index_keys.write(projected[1], *at, views[EntriesIndex], given.cells)

    def _attend(
        self,
        x: Tensor,
        q_latent: Tensor,
        q: Tensor,
        step: StepInput,
        views: LayerViews,
        rope: Rotation,
    ) -> Tensor:
        window = views[Window]
        if self.compressor is None:
            attend = step[Window].attend
            assert attend is not None, "the kind knows of layers with a window alone"
            return self._over(q, window, None, attend, None)
        chosen = self._choose(x, q_latent, step, views, rope)
        return self._over_parts(q, window, views[self.entries], step[self.entries], chosen)

    def _over_parts(
        self,
        q: Tensor,
        window: LatentView,
        entries: LatentView,
        given: EntryInput,
        chosen: Tensor | None,
    ) -> Tensor:
        """Tokens that see all, and those that choose."""
        if given.choosing is None or given.seeing is None:
            only = given.seeing or given.choosing
            assert only is not None, "a step has tokens"
            return self._over(q, window, entries, only.prepared, chosen)
        out = torch.empty_like(q)
        for part, lists in ((given.seeing, None), (given.choosing, chosen)):
            out[part.at] = self._over(q[part.at], window, entries, part.prepared, lists)
        return out

    def _over(
        self,
        q: Tensor,
        window: LatentView,
        entries: LatentView | None,
        prepared: Opaque,
        chosen: Tensor | None,
    ) -> Tensor:
        return self.op.sink_attention.run(
            q,
            window,
            entries,
            prepared,
            sinks=self.sinks,
            softmax_scale=self.spec.softmax_scale,
            chosen=chosen,
        )

    def _choose(
        self,
        x: Tensor,
        q_latent: Tensor,
        step: StepInput,
        views: LayerViews,
        rope: Rotation,
    ) -> Tensor | None:
        """The entries [tokens that choose, topk] that they attend to; None where nobody chooses."""
        if self.indexer is None:
            return None
        index = step[EntriesIndex]
        if not index.count:
            return None
        if step.forced is not None and step.forced.positions:
            chosen = step.forced.positions.pop(0)
        else:
            chosen = self.indexer.choose(x, q_latent, rope, index, views[EntriesIndex])
        if step.recorded is not None:
            step.recorded.positions.append(chosen)
        return chosen


class Compressor:
    """From tokens to entries."""

    def __init__(
        self,
        spec: CompressedSpec,
        build: Build,
        weights: Weights,
        name: str,
        tails: type[Tails],
        rounded: Rounded | None,
    ) -> None:
        assert build.ops.compressed is not None
        self.ops = build.ops.compressed
        self.rounded = rounded
        self.tails, self.eps, self.pairing = tails, spec.norm_eps, spec.rope.pairing
        self.bias = weights.take(f"{name}.position_bias").float()
        self.norm = weights.take(f"{name}.norm.weight")

    def write(
        self,
        projected: Tensor,
        step: StepInput,
        views: LayerViews,
        rope: tuple[Tensor, Tensor],
        entries: LatentView | IndexView,
        at: Tensor,
    ) -> None:
        """The entries that the step completes, to these cells. `rope`: at their positions."""
        given = step[self.tails]
        u, z = projected.chunk(2, dim=-1)
        tokens = (u, z, views[self.tails], given.cells, given.prepared)
        how = _How(
            ape=self.bias,
            norm=self.norm,
            eps=self.eps,
            cos=rope[0],
            sin=rope[1],
            pairing=self.pairing,
        )
        into, op = self.ops.compress_into, self.ops.compress
        if into is not None and entries.layout.fp8 is None and self.rounded is None:
            into.run_into(*tokens, **how, entries=entries, at=at)
            return
        assert op is not None, "the plan knows of entries"
        made = op.run(*tokens, **how)
        if self.rounded is not None:
            made = self.rounded(made)
        if isinstance(entries, LatentView):
            _put(entries, at, made)
        else:
            entries.write(at, made)


def _projection(weights: Weights, name: str) -> Tensor:
    """What a compressor is given of each token: one GEMM makes it for all of a layer's."""
    both = (weights.take(f"{name}.{part}.weight") for part in ("kv_proj", "gate_proj"))
    return torch.cat(tuple(both))


def _put(view: LatentView, cells: Tensor, rows: Tensor) -> None:
    latent = view.layout.latent
    view.write(cells, rows[:, :latent], rows[:, latent:])


class _How(TypedDict):
    """What entries are made with."""

    ape: Tensor
    norm: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    pairing: Pairing
