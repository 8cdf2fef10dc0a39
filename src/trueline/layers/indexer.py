"""The indexer of sparse latent attention: a small key per token, and the choice of the positions
that a query may see."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.layers.context import Build, Rope, SparseStep, Weights
from trueline.ops.rope import inv_freq
from trueline.spec.mixer import MLASpec


class Indexer:
    def __init__(self, mla: MLASpec, build: Build, weights: Weights, name: str) -> None:
        assert mla.indexer is not None
        self.spec, self.ops = mla.indexer, build.ops
        self.compute = build.plan.compute_dtype
        pack = build.ops.linear.pack
        self.key_weight = weights.stored(f"{name}.wk.weight")
        """Left to the layer, which multiplies the same input by its own weights."""
        self.q = pack(weights.stored(f"{name}.wq_b.weight"))
        self.norm = weights.take(f"{name}.k_norm.weight"), weights.take(f"{name}.k_norm.bias")
        self.weights = pack(weights.take(f"{name}.weights_proj.weight").float())
        ours, theirs = self.spec.rope, mla.rope
        assert torch.equal(inv_freq(ours), inv_freq(theirs)), "one table turns both"
        assert ours.cos_sin_scale == theirs.cos_sin_scale

    def keys(self, projected: Tensor, rope: Rope) -> Tensor:
        """What the index cache holds of each token: [n, head_dim]."""
        weight, bias = (part.float() for part in self.norm)
        normed = torch.nn.functional.layer_norm(
            projected.float(), projected.shape[-1:], weight, bias, self.spec.key_norm_eps
        )
        return self._rotate(normed.to(self.compute)[:, None], rope)[:, 0]

    def choose(
        self, x: Tensor, q_latent: Tensor, rope: Rope, step: SparseStep, view: IndexView
    ) -> Tensor:
        """Logical positions [rows, topk] for the rows that see more than topk."""
        assert rope is not None
        spec, at = self.spec, step.at
        turns = (rope[0][at], rope[1][at])
        q = self.ops.linear.run(q_latent[at], self.q).view(step.count, spec.heads, spec.head_dim)
        weights = self.ops.linear.run(x[at].float(), self.weights)
        scores = self.ops.index_scores.run(
            self._rotate(q, turns), weights * (spec.head_weight * spec.scale), view, step.scores
        )
        chosen: Tensor = self.ops.top_positions.run(scores, step.lengths, spec.topk)
        return chosen

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        """The first channels turn, the others stay."""
        assert rope is not None
        dim = self.spec.rope.dim
        turned = self.ops.rope.run(x[..., :dim], *rope, self.spec.rope.pairing)
        return torch.cat((turned, x[..., dim:]), dim=-1)
