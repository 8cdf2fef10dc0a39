"""Linear attention: one GEMM for q, k, v and the gate; a state per sequence instead of a cache
row per token."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.lightning import LightningState
from trueline.cache.state import StateView
from trueline.layers.context import ANYWHERE, Build, StepInput, Weights
from trueline.layers.linear import WeightGemm
from trueline.layers.ropes import Rope
from trueline.ops.capabilities import Opaque
from trueline.parallel.placement import Replicated
from trueline.spec.mixer import LightningSpec


class Lightning:
    capabilities = ANYWHERE

    def __init__(self, spec: LightningSpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.row_parallel = spec, build.ops, build.row_parallel
        assert build.ops.recurrent is not None, "the plan knows of the layers with a state"
        self.recurrent = build.ops.recurrent
        parts = tuple(
            weights.stored(f"{name}.{part}.weight") for part in ("query_key_value", "g_proj")
        )
        self.qkv_gate = WeightGemm(build, *parts)
        self.norms = None
        if spec.qk_norm:
            names = (f"{name}.query_layernorm.weight", f"{name}.key_layernorm.weight")
            self.norms = weights.take(names[0]), weights.take(names[1])
        self.out_norm = weights.take(f"{name}.g_norm.weight")
        o = weights.stored(f"{name}.o_proj.weight")
        build.row_parallel.check(f"{name}.o_proj", o.shape, spec.heads, spec.head_dim)
        self.o = WeightGemm(build, o)
        self.slopes = torch.tensor(spec.slopes, device=build.plan.device.torch)

    def forward(self, x: Replicated, step: StepInput, views: LayerViews, rope: Rope) -> Replicated:
        spec, ops, view = self.spec, self.ops, views[LightningState]
        whole = self.qkv_gate(x)
        channels = spec.heads.count * spec.head_dim
        q, k, v = self.recurrent.qkv_prepare.run(
            whole[:, : 3 * channels],
            heads=spec.heads.count,
            silu=spec.silu,
            norms=self.norms,
            eps=spec.norm_eps,
            rope=None if rope is None or spec.rope is None else (*rope, spec.rope.pairing),
            parts=ops.parts,
        )
        out = self.recurrent.gated_norm.run(
            self._attend(q, k, v, step, view).flatten(1),
            whole[:, 3 * channels :],
            weight=self.out_norm,
            groups=spec.norm_groups.count,
            eps=spec.norm_eps,
            parts=ops.parts,
        )
        return self.row_parallel.run(out, self.o, spec.heads)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput, view: StateView) -> Tensor:
        given = step[LightningState]
        attend, slopes, scale = self.recurrent.lightning, self.slopes, self.spec.scale

        def decoded(at: slice | Tensor, prepared: Opaque) -> Tensor:
            return attend.decode(q[at], k[at], v[at], view, prepared, slopes=slopes, scale=scale)

        if given.prefill is not None:
            out = attend.prefill(q, k, v, view, given.prefill, slopes=slopes, scale=scale)
        elif len(given.decode) == 1:
            return decoded(*given.decode[0])
        else:
            out = torch.empty_like(v)
        for at, prepared in given.decode:
            out[at] = decoded(at, prepared)
        return out
