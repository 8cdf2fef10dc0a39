"""Latent attention: fused projections, the cache, and both forms of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.layers.context import Build, Rope, StepInput, Weights
from trueline.ops.mla_prefill import HeadWeights, cheaper_form
from trueline.spec.mixer import MLASpec


class MLA:
    def __init__(self, spec: MLASpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        pack = build.ops.linear.pack
        first = "q_proj" if spec.q_lora_rank is None else "q_a_proj"
        query = weights.take(f"{name}.{first}.weight")
        self.query_width = query.shape[0]
        # One product gives the query (or its latent) and the key-value latent.
        self.qkv_a = pack(torch.cat((query, weights.take(f"{name}.kv_a_proj_with_mqa.weight"))))
        if spec.q_lora_rank is not None:
            self.q_norm = weights.take(f"{name}.q_a_layernorm.weight")
            self.q_b = pack(weights.take(f"{name}.q_b_proj.weight"))
        self.kv_norm = weights.take(f"{name}.kv_a_layernorm.weight")
        self.heads = _split_heads(spec, weights.take(f"{name}.kv_b_proj.weight"))
        pack_heads, steady = build.ops.head_product.pack, build.plan.batch_invariant
        self.absorb = pack_heads(self.heads.key, build.ops.linear, steady)
        self.expand = pack_heads(self.heads.value, build.ops.linear, steady)
        self.o = pack(weights.take(f"{name}.o_proj.weight"))

    def forward(self, x: Tensor, step: StepInput, view: LatentView, rope: Rope) -> Tensor:
        spec = self.spec
        assert rope is not None
        q, latent, key = self._project(x)
        turn = self.ops.rope.run
        q_rope = turn(q[..., spec.qk_nope_head_dim :], *rope, spec.rope.pairing)
        key = turn(key[:, None], *rope, spec.rope.pairing)[:, 0]
        view.write(step.cells, latent, key)
        q_nope = q[..., : spec.qk_nope_head_dim]
        out = q.new_empty(len(x), spec.heads.count, spec.v_head_dim)
        d = step.num_decode
        if d:
            out[:d] = self._decode(q_nope[:d], q_rope[:d], step, view)
        for part in step.prefill:
            at = part.tokens
            queries = torch.cat((q_nope[at], q_rope[at]), dim=-1)
            form = cheaper_form(
                self.heads, spec.qk_rope_head_dim, part.row.count, part.row.start + part.row.count
            )
            out[at] = self.ops.mla_prefill.run(
                queries, view, part.row, self.heads, softmax_scale=spec.softmax_scale, form=form
            )
        return self.collective.add(self.ops.linear.run(out.flatten(1), self.o))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, heads, nope + rope], normalised latent [n, latent], key part [n, rope]."""
        spec, ops = self.spec, self.ops
        both = ops.linear.run(x, self.qkv_a)
        q = both[:, : self.query_width]
        if spec.q_lora_rank is not None:
            q = ops.rms_norm.run(q, self.q_norm, spec.latent_norm_eps)
            q = ops.linear.run(q, self.q_b)
        kv = both[:, self.query_width :]
        latent = ops.rms_norm.run(kv[:, : spec.kv_lora_rank], self.kv_norm, spec.latent_norm_eps)
        return q.reshape(len(x), spec.heads.count, -1), latent, kv[:, spec.kv_lora_rank :]

    def _decode(self, q_nope: Tensor, q_rope: Tensor, step: StepInput, view: LatentView) -> Tensor:
        moved = self.ops.head_product.run(q_nope, self.absorb)
        queries = torch.cat((moved, q_rope), dim=-1)
        out, _ = self.ops.mla_decode.run(
            queries, view, step.prepared, softmax_scale=self.spec.softmax_scale
        )
        y: Tensor = self.ops.head_product.run(out, self.expand)
        return y


def _split_heads(spec: MLASpec, weight: Tensor) -> HeadWeights:
    """kv_b_proj rows of a head: first the key part, then the value."""
    heads = weight.view(spec.heads.count, -1, spec.kv_lora_rank)
    key, value = heads[:, : spec.qk_nope_head_dim], heads[:, spec.qk_nope_head_dim :]
    return HeadWeights(key.mT.contiguous(), value.contiguous())
