"""Linear attention: one product for q, k, v and the gate; a state per sequence instead of a cache
row per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.cache.state import StateView
from trueline.layers.context import Build, Rope, StepInput, Weights
from trueline.ops import steady
from trueline.ops.lightning import StateRow
from trueline.spec.mixer import LightningSpec


class Lightning:
    def __init__(self, spec: LightningSpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.sums = spec, build.ops, build.sums
        assert build.ops.lightning is not None, "the plan knows of the layers with a state"
        self.attend = build.ops.lightning
        pack = build.ops.linear.pack
        parts = (weights.stored(f"{name}.{part}.weight") for part in ("query_key_value", "g_proj"))
        self.qkv_gate = pack(torch.cat(tuple(parts)))
        if spec.qk_norm:
            self.q_norm = weights.take(f"{name}.query_layernorm.weight")
            self.k_norm = weights.take(f"{name}.key_layernorm.weight")
        self.out_norm = weights.take(f"{name}.g_norm.weight")
        group = len(self.out_norm) // spec.norm_groups.count
        self.ones = torch.ones_like(self.out_norm[:group])
        self.o = pack(weights.stored(f"{name}.o_proj.weight"))
        self.slopes = torch.tensor(spec.slopes, device=build.plan.device.torch)

    def forward(self, x: Tensor, step: StepInput, view: StateView, rope: Rope) -> Tensor:
        q, k, v, gate = self._project(x, rope)
        mixed = self._attend(q, k, v, step, view)
        out = self._norm_groups(mixed.flatten(1)) * steady.sigmoid(gate.float()).to(x.dtype)
        return self.sums.over(out, lambda x: self.ops.linear.run(x, self.o))

    def _project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [n, heads, head_dim], normed and rotated; gate [n, channels]."""
        spec, norm = self.spec, self.ops.rms_norm.run
        all_parts = self.ops.linear.run(x, self.qkv_gate)
        channels = spec.heads.count * spec.head_dim
        qkv, gate = all_parts[:, : 3 * channels], all_parts[:, 3 * channels :]
        if spec.silu:
            qkv = steady.silu(qkv)
        q, k, v = qkv.reshape(len(x), 3, spec.heads.count, spec.head_dim).unbind(1)
        if spec.qk_norm:
            q, k = norm(q, self.q_norm, spec.norm_eps), norm(k, self.k_norm, spec.norm_eps)
        return self._rotate(q, rope), self._rotate(k, rope), v, gate

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """The first channels of every head turn, the others stay."""
        if rope is None or self.spec.rope is None:
            return x
        dim = self.spec.rope.dim
        turned = self.ops.rope.run(x[..., :dim], *rope, self.spec.rope.pairing)
        return torch.cat((turned, x[..., dim:]), dim=-1)

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

    def _norm_groups(self, x: Tensor) -> Tensor:
        groups = x.view(len(x) * self.spec.norm_groups.count, -1)
        normed: Tensor = self.ops.rms_norm.run(groups, self.ones, self.spec.norm_eps)
        return normed.view_as(x) * self.out_norm
