"""Latent attention: fused projections, the cache, and both forms of attention; with an indexer,
over the positions that it selects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import DecodeInput, Latent, LatentInput, SelectedInput
from trueline.cache.store import LatentView
from trueline.layers.context import ANYWHERE, Build, StepInput, Weights
from trueline.layers.indexer import Indexer
from trueline.layers.linear import WeightGemm
from trueline.layers.ropes import Rope
from trueline.ops.capabilities import Opaque
from trueline.ops.mla_prefill import HeadWeights
from trueline.parallel.placement import Replicated
from trueline.spec.mixer import MLASpec


@dataclass(frozen=True, slots=True)
class Projected:
    q: Tensor  # [n, heads, nope + rope]
    latent: Tensor  # [n, latent]
    key: Tensor  # [n, rope]
    q_latent: Tensor  # [n, q_lora_rank], normalised; the input's own where there is none
    index_key: Tensor  # [n, index head]; empty without an indexer


class MLA:
    capabilities = ANYWHERE

    def __init__(self, spec: MLASpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.row_parallel = spec, build.ops, build.row_parallel
        assert build.ops.latent is not None, "the plan knows of latent attention"
        self.latent = build.ops.latent
        own = spec.indexer is not None and not spec.indexer.shared
        self.indexer = Indexer(spec, build, weights, f"{name}.indexer") if own else None
        first = "q_proj" if spec.q_lora_rank is None else "q_a_proj"
        query = weights.stored(f"{name}.{first}.weight")
        latent = weights.stored(f"{name}.kv_a_proj_with_mqa.weight")
        index = [weights.stored(f"{name}.indexer.wk.weight")] if own else []
        index_width = sum(key.shape[0] for key in index)
        self.widths = [query.shape[0], index_width, spec.kv_lora_rank, spec.qk_rope_head_dim]
        # One GEMM gives the query (or its latent), the index key and the key-value latent: last,
        # since it is the one that does not end where a block of fp8 does.
        self.first = WeightGemm(build, query, *index, latent)
        if spec.q_lora_rank is not None:
            self.q_norm = weights.take(f"{name}.q_a_layernorm.weight")
            self.q_b = WeightGemm(build, weights.stored(f"{name}.q_b_proj.weight"))
        self.kv_norm = weights.take(f"{name}.kv_a_layernorm.weight")
        # Its parts are transposed and divided by heads: dequantised, whatever it is stored as.
        heads = _split_heads(spec, weights.stored(f"{name}.kv_b_proj.weight").dequantise())
        pack_heads, batch_invariant = build.ops.batched_gemm.pack, build.plan.batch_invariant
        self.absorb = pack_heads(heads.key, build.ops.linear, batch_invariant)
        self.expand = pack_heads(heads.value, build.ops.linear, batch_invariant)
        compute = build.plan.compute_dtype
        self.heads = HeadWeights(heads.key.to(compute), heads.value.to(compute))
        o = weights.stored(f"{name}.o_proj.weight")
        build.row_parallel.check(f"{name}.o_proj", o.shape, spec.heads, spec.v_head_dim)
        self.o = WeightGemm(build, o)

    def forward(self, x: Replicated, step: StepInput, views: LayerViews, rope: Rope) -> Replicated:
        spec = self.spec
        assert rope is not None
        made = self._project(x)
        latent = views[Latent]
        q_nope = made.q[..., : spec.qk_nope_head_dim]
        wide = self.latent.latent_write.run(
            made.latent,
            made.key,
            made.q[..., spec.qk_nope_head_dim :],
            latent,
            step[Latent].cells,
            norm=self.kv_norm,
            eps=spec.latent_norm_eps,
            cos=rope[0],
            sin=rope[1],
            pairing=spec.rope.pairing,
            parts=self.ops.parts,
        )
        index = step[IndexKeys] if spec.indexer is not None else None
        if self.indexer is not None:
            self._select(self.indexer, x, made, step, views[IndexKeys], rope)
        chosen = index.chosen if index is not None else None
        out = self._attend(q_nope, wide, step[Latent], latent, chosen)
        return self.row_parallel.run(out.flatten(1), self.o, spec.heads)

    def _attend(
        self,
        q_nope: Tensor,
        wide: Tensor,
        given: LatentInput,
        view: LatentView,
        chosen: Tensor | None,
    ) -> Tensor:
        """[n, heads, value]. Rows of one kind are not put together again. `chosen`: the positions
        that rows which choose attend to."""
        n, decode, selected = len(q_nope), given.decode, given.selected
        if decode is not None and decode.count == n:
            return self._decode(self._absorbed(q_nope, wide), decode, view)
        if selected is not None and selected.count == n:
            return self._attend_selected(self._absorbed(q_nope, wide), selected, view, chosen)
        out = q_nope.new_empty(n, self.spec.heads.count, self.spec.v_head_dim)
        if decode is not None:
            at = decode.at
            out[at] = self._decode(self._absorbed(q_nope[at], wide[at]), decode, view)
        if selected is not None:
            at = selected.at
            q = self._absorbed(q_nope[at], wide[at])
            out[at] = self._attend_selected(q, selected, view, chosen)
        q_rope = wide[..., self.spec.kv_lora_rank :]
        if given.masked is not None:
            self._attend_masked(q_nope, q_rope, given.masked, view, out, chosen)
        if given.prefill is not None:
            self._prefill(q_nope, q_rope, given.prefill, view, out)
        return out

    def _project(self, x: Tensor) -> Projected:
        spec, ops = self.spec, self.ops
        q, index_key, latent, key = torch.split(self.first(x), self.widths, dim=-1)
        if spec.q_lora_rank is not None:
            q_latent = ops.rms_norm.run(q, self.q_norm, spec.latent_norm_eps)
            q = self.q_b(q_latent)
        else:
            q_latent = q
        return Projected(q.reshape(len(x), spec.heads.count, -1), latent, key, q_latent, index_key)

    def _select(
        self,
        indexer: Indexer,
        x: Tensor,
        made: Projected,
        step: StepInput,
        view: IndexView,
        rope: Rope,
    ) -> None:
        """Keys are written for every token; only rows that see too much choose. A layer without
        an indexer of its own leaves the choice of the layer before."""
        index = step[IndexKeys]
        indexer.write(made.index_key, rope, view, index.cells)
        if not index.count:
            return
        if step.forced is not None and step.forced.positions:
            index.chosen = step.forced.positions.pop(0)
        else:
            index.chosen = indexer.choose(x, made.q_latent, rope, index, view)
        if step.recorded is not None:
            step.recorded.positions.append(index.chosen)

    def _prefill(
        self, q_nope: Tensor, q_rope: Tensor, prepared: Opaque, view: LatentView, out: Tensor
    ) -> None:
        self.latent.mla_prefill.run(
            q_nope,
            q_rope,
            view,
            prepared,
            self.heads,
            out,
            softmax_scale=self.spec.softmax_scale,
        )

    def _absorbed(self, q_nope: Tensor, wide: Tensor) -> Tensor:
        """`wide` with the query moved into the latent before its rotated part."""
        self.ops.batched_gemm.run(q_nope, self.absorb, wide[..., : self.spec.kv_lora_rank])
        return wide

    def _decode(self, q: Tensor, rows: DecodeInput, view: LatentView) -> Tensor:
        out, _ = self.latent.mla_decode.run(
            q, view, rows.prepared, softmax_scale=self.spec.softmax_scale
        )
        return self.ops.batched_gemm.run(out, self.expand)

    def _attend_selected(
        self, q: Tensor, rows: SelectedInput, view: LatentView, chosen: Tensor | None
    ) -> Tensor:
        assert self.ops.sparse is not None
        assert chosen is not None, "a layer before has chosen"
        out, _ = self.ops.sparse.sparse_mla.run(
            q,
            view,
            rows.prepared,
            chosen[rows.rows],
            softmax_scale=self.spec.softmax_scale,
        )
        return self.ops.batched_gemm.run(out, self.expand)

    def _attend_masked(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        prepared: Opaque,
        view: LatentView,
        out: Tensor,
        chosen: Tensor | None,
    ) -> None:
        assert chosen is not None, "a layer before has chosen"
        assert self.latent.masked_prefill is not None
        self.latent.masked_prefill.run_chosen(
            q_nope,
            q_rope,
            view,
            prepared,
            self.heads,
            out,
            chosen,
            softmax_scale=self.spec.softmax_scale,
        )


def _split_heads(spec: MLASpec, weight: Tensor) -> HeadWeights:
    """kv_b_proj rows of a head: first the key part, then the value."""
    heads = weight.view(spec.heads.count, -1, spec.kv_lora_rank)
    key, value = heads[:, : spec.qk_nope_head_dim], heads[:, spec.qk_nope_head_dim :]
    return HeadWeights(key.mT.contiguous(), value.contiguous())
