"""The indexer of sparse latent attention: a small key per token, and the choice of the positions
that a query may see."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds.index_keys import IndexInput
from trueline.layers.context import Build, Weights
from trueline.layers.linear import WeightGemm
from trueline.layers.ropes import Rope
from trueline.ops.capabilities import Opaque
from trueline.ops.index_scores import IndexScores
from trueline.ops.rope import inv_freq
from trueline.ops.topk import TopK
from trueline.spec.mixer import MLASpec


class Indexer:
    def __init__(self, mla: MLASpec, build: Build, weights: Weights, name: str) -> None:
        assert mla.indexer is not None
        assert build.ops.sparse is not None, "the plan knows of the layers with an indexer"
        self.spec, self.ops, self.sparse = mla.indexer, build.ops, build.ops.sparse
        self.q = WeightGemm(build, weights.stored(f"{name}.wq_b.weight"))
        self.norm = weights.take(f"{name}.k_norm.weight"), weights.take(f"{name}.k_norm.bias")
        by_head = weights.take(f"{name}.weights_proj.weight").float()
        self.weights = self.ops.linear.pack(by_head * (self.spec.head_weight * self.spec.scale))
        ours, theirs = self.spec.rope, mla.rope
        assert torch.equal(inv_freq(ours), inv_freq(theirs)), "one table rotates both"
        assert ours.cos_sin_scale == theirs.cos_sin_scale

    def write(self, projected: Tensor, rope: Rope, view: IndexView, cells: Tensor) -> None:
        """What the index cache holds of each token."""
        norm, bias = self.norm
        assert rope is not None
        self.sparse.index_write.run(
            projected,
            view,
            cells,
            norm=norm,
            bias=bias,
            eps=self.spec.key_norm_eps,
            cos=rope[0],
            sin=rope[1],
            pairing=self.spec.rope.pairing,
            rope=self.ops.rope,
        )

    def choose(
        self, x: Tensor, q_latent: Tensor, rope: Rope, step: IndexInput, view: IndexView
    ) -> Tensor:
        """Logical positions [rows, topk] for the rows that see more than topk."""
        assert rope is not None
        spec, at = self.spec, step.at
        q = self.q(q_latent[at]).view(step.count, spec.heads, spec.head_dim)
        q = self.sparse.index_write.rotate(
            q, cos=rope[0][at], sin=rope[1][at], pairing=spec.rope.pairing, rope=self.ops.rope
        )
        weights = self.ops.linear.run(x[at].float(), self.weights)
        ops = self.sparse
        return best_places(ops.index_scores, ops.topk, q, weights, step, view, spec.topk)


def best_places(
    scores: IndexScores[Opaque],
    topk: TopK,
    q: Tensor,
    weights: Tensor,
    step: IndexInput,
    view: IndexView,
    count: int,
) -> Tensor:
    """[rows, count] of the rows that choose, scored some rows at a time."""
    chosen = [
        topk.run(scores.run(q[rows], weights[rows], view, prepared), step.lengths[rows], count)
        for rows, prepared in step.scores
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
