"""Linear attention: one product for q, k, v and the gate; a state per sequence instead of a cache
row per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.cache.kinds.lightning import LightningState
from trueline.cache.state import StateView
from trueline.layers.context import Build, Rope, StepInput, Weights
from trueline.layers.linear import Linear
from trueline.ops.lightning import StateRow
from trueline.spec.mixer import LightningSpec
from trueline.weights.value import Weight


class Lightning:
    def __init__(self, spec: LightningSpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.sums = spec, build.ops, build.sums
        assert build.ops.lightning is not None, "the plan knows of the layers with a state"
        self.attend = build.ops.lightning
        parts = tuple(
            weights.stored(f"{name}.{part}.weight") for part in ("query_key_value", "g_proj")
        )
        self.qkv_gate = Linear(build, Weight.concat(parts))
        self.norms = None
        if spec.qk_norm:
            names = (f"{name}.query_layernorm.weight", f"{name}.key_layernorm.weight")
            self.norms = weights.take(names[0]), weights.take(names[1])
        self.out_norm = weights.take(f"{name}.g_norm.weight")
        self.o = Linear(build, weights.stored(f"{name}.o_proj.weight"))
        self.slopes = torch.tensor(spec.slopes, device=build.plan.device.torch)

    def forward(self, x: Tensor, step: StepInput, views: LayerViews, rope: Rope) -> Tensor:
        spec, ops, view = self.spec, self.ops, views[LightningState]
        whole = self.qkv_gate(x)
        channels = spec.heads.count * spec.head_dim
        q, k, v = ops.linear_inputs.run(
            whole[:, : 3 * channels],
            heads=spec.heads.count,
            silu=spec.silu,
            norms=self.norms,
            eps=spec.norm_eps,
            rope=None if rope is None or spec.rope is None else (*rope, spec.rope.pairing),
            parts=ops.parts,
        )
        out = ops.gated_norm.run(
            self._attend(q, k, v, step, view).flatten(1),
            whole[:, 3 * channels :],
            weight=self.out_norm,
            groups=spec.norm_groups.count,
            eps=spec.norm_eps,
            parts=ops.parts,
        )
        return self.sums.over(out, self.o)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput, view: StateView) -> Tensor:
        states = step.states
        assert states is not None
        options = {"slopes": self.slopes, "scale": self.spec.scale}
        d = states.num_decode
        decoded = torch.empty_like(v[:0])
        if d:
            decoded = self.attend.decode(q[:d], k[:d], v[:d], view, states.prepared, **options)
        if not states.prefill:
            return decoded
        out = self._prefill(q, k, v, states.prefill, view, options)
        out[:d] = decoded
        return out

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: tuple[tuple[slice, StateRow], ...],
        view: StateView,
        options: dict[str, Any],
    ) -> Tensor:
        """Of all tokens, those of `parts` written."""
        if hasattr(self.attend, "prefill_rows"):
            out: Tensor = self.attend.prefill_rows(q, k, v, view, parts, **options)
            return out
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for at, row in parts:
            out[at] = self.attend.prefill(q[at], k[at], v[at], view, row, **options)
        return out
