"""The indexer of compressed attention: which entries a query may see."""

from __future__ import annotations

from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds.index_keys import IndexInput
from trueline.layers.context import Build, Weights
from trueline.layers.indexer import best_places
from trueline.layers.linear import WeightGemm
from trueline.ops.sink_prepare import Rotation
from trueline.spec.mixer import CompressedSpec


class EntryIndexer:
    def __init__(self, spec: CompressedSpec, build: Build, weights: Weights, name: str) -> None:
        assert spec.indexer is not None
        assert build.ops.compressed is not None
        self.spec, self.ops, self.op = spec.indexer, build.ops, build.ops.compressed
        self.q = WeightGemm(build, weights.stored(f"{name}.q_b_proj.weight"))
        by_head = weights.take(f"{name}.weights_proj.weight").float()
        self.weights = self.ops.linear.pack(by_head * (self.spec.head_weight * self.spec.scale))

    def choose(
        self,
        x: Tensor,
        q_latent: Tensor,
        rope: Rotation,
        step: IndexInput,
        view: IndexView,
    ) -> Tensor:
        """Entries [rows, topk] for the rows that see more than topk."""
        spec, at = self.spec, step.at
        q = self.q(q_latent[at]).view(step.count, spec.heads, spec.head_dim)
        q = self.op.sink_prepare.rotate(q, rope=rope._replace(cos=rope.cos[at], sin=rope.sin[at]))
        if self.op.row_rounding is not None:
            q = self.op.row_rounding.index(q)
        weights = self.ops.linear.run(x[at].float(), self.weights)
        scores, topk = self.op.index_scores, self.op.topk
        assert scores is not None, "the plan knows of layers that choose"
        assert topk is not None
        return best_places(scores, topk, q, weights, step, view, spec.topk)
