"""Mistakes that change the last bit only, when a model runs on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.layers.feedforward import MoE
from trueline.ops import invariant_math
from trueline.parallel.collective import RowParallel, ThreadRank
from trueline.verify.faults import Fault, Make, Running


def _own_part_first(run: Make) -> Make:
    """Each rank sums over its own heads or width, then these sums are added."""

    def broken(self: RowParallel, x: Tensor, gemm: Make) -> Tensor:
        if not self.invariant_sums:
            summed: Tensor = run(self, x, gemm)
            return summed
        full, part = self.collective.all_gather(x, 1), x.shape[1]
        total = torch.zeros(())
        for start in range(0, full.shape[1], part):
            mine = torch.zeros_like(full)
            mine[:, start : start + part] = full[:, start : start + part]
            total = total + gemm(mine)
        return self.collective.all_gather(total, 1)

    return broken


def _experts_per_rank(_: Make) -> Make:
    """Each rank adds up its own experts' shares, then these sums are added."""

    def broken(self: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        first = self.spec.experts.start
        mine = self.op.run(x, ids, weights, self.experts, self.linear, first=first)
        return self.collective.all_reduce(mine)

    return broken


def _experts_by_rank(in_order: Make) -> Make:
    """A token's experts are added as the ranks hold them, not in the order of its ids."""

    def broken(self: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> object:
        order = ids.argsort(1)
        return in_order(self, x, ids.gather(1, order), weights.gather(1, order))

    return broken


def _bits_of_the_heads(run: Make) -> Make:
    """A kernel takes another path for another number of heads."""

    def broken(q: Tensor, *given: object, **named: object) -> tuple[Tensor, Tensor]:
        out, lse = run(q, *given, **named)
        return out * (1 + 2.0**-22 * q.shape[1]), lse

    return broken


def _last_rank_first(_: Make) -> Make:
    def broken(self: ThreadRank, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._group.meet(self._rank, x)[::-1], dim)

    return broken


_BITS, _L = "ranks = one, bitwise", "ling"

RANK_FAULTS = [
    Fault("rank-sums-first", "each rank sums over its own heads first", _BITS, _L,
          RowParallel, "run", _own_part_first),
    Fault("rank-experts-first", "each rank adds up its own experts first", _BITS, _L,
          MoE, "_in_order", _experts_per_rank),
    Fault("experts-by-rank", "experts are added in the order of the ranks", _BITS, _L,
          MoE, "_in_order", _experts_by_rank),
    Fault("bits-of-the-heads", "a head's bits depend on how many a rank has", _BITS, _L,
          Running("mla_decode"), "run", _bits_of_the_heads),
    Fault("scalar-tail", "the last channels of a rank's gate take another exp", _BITS, _L,
          invariant_math, "RUN", lambda _: 1),
    Fault("ranks-reversed", "what the ranks made is joined from the last to the first", _BITS, _L,
          ThreadRank, "all_gather", _last_rank_first),
]  # fmt: skip
