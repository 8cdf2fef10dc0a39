"""The indexer of sparse latent attention: a small key per token, and the choice of the positions
that a query may see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.layers.context import Build, Rope, SparseStep, Weights
from trueline.layers.linear import Linear
from trueline.ops.rope import inv_freq
from trueline.spec.mixer import MLASpec


class Indexer:
    def __init__(self, mla: MLASpec, build: Build, weights: Weights, name: str) -> None:
        assert mla.indexer is not None
        self.spec, self.ops = mla.indexer, build.ops
        self.key_weight = weights.stored(f"{name}.wk.weight")
        """Left to the layer, which multiplies the same input by its own weights."""
        self.q = Linear(build, weights.stored(f"{name}.wq_b.weight"))
        self.norm = weights.take(f"{name}.k_norm.weight"), weights.take(f"{name}.k_norm.bias")
        by_head = weights.take(f"{name}.weights_proj.weight").float()
        self.weights = self.ops.linear.pack(by_head * (self.spec.head_weight * self.spec.scale))
        ours, theirs = self.spec.rope, mla.rope
        assert torch.equal(inv_freq(ours), inv_freq(theirs)), "one table turns both"
        assert ours.cos_sin_scale == theirs.cos_sin_scale

    def write(self, projected: Tensor, rope: Rope, view: IndexView, cells: Tensor) -> None:
        """What the index cache holds of each token."""
        norm, bias = self.norm
        self.ops.index_write.run(
            projected,
            view,
            cells,
            norm=norm,
            bias=bias,
            eps=self.spec.key_norm_eps,
            **self._turning(rope),
        )

    def choose(
        self, x: Tensor, q_latent: Tensor, rope: Rope, step: SparseStep, view: IndexView
    ) -> Tensor:
        """Logical positions [rows, topk] for the rows that see more than topk."""
        assert rope is not None
        spec, at, run = self.spec, step.at, self.ops.index_scores.run
        q = self.q(q_latent[at]).view(step.count, spec.heads, spec.head_dim)
        q = self.ops.index_write.turn(q, **self._turning((rope[0][at], rope[1][at])))
        weights = self.ops.linear.run(x[at].float(), self.weights)
        chosen: list[Tensor] = [
            self.ops.top_positions.run(
                run(q[rows], weights[rows], view, prepared), step.lengths[rows], spec.topk
            )
            for rows, prepared in step.scores
        ]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _turning(self, rope: Rope) -> dict[str, Any]:
        """By which table, and how channels pair up."""
        assert rope is not None
        pairing = self.spec.rope.pairing
        return {"cos": rope[0], "sin": rope[1], "pairing": pairing, "rope": self.ops.rope}
