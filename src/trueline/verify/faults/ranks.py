"""Mistakes of models that run on several ranks: parts that are counted twice or not at all, and
what changes the last bit only. rank_weights.py has those of what a rank loads, rank_steps.py those
of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueline.layers.decoder import Decoder
from trueline.layers.feedforward import MoE
from trueline.ops import invariant_math
from trueline.parallel.collective import Collective, RowParallel, Solo, ThreadRank
from trueline.parallel.placement import Divided, Partial, Replicated
from trueline.parallel.stated import Stated
from trueline.spec.mixer import LightningSpec
from trueline.spec.source import Span
from trueline.verify.faults import Fault, Make, Running


def is_not_the_first(collective: Collective) -> bool:
    """Whether the mistakes that one rank makes alone are made here."""
    if isinstance(collective, Stated):
        collective = collective._collective
    return isinstance(collective, ThreadRank) and collective._rank > 0


def _own_part_first(run: Make) -> Make:
    """Each rank sums over its own heads or width, then these sums are added."""

    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> Tensor:
        if not self.invariant_sums or over.is_whole:
            summed: Tensor = run(self, x, gemm, over)
            return summed
        full, part = self.collective.all_gather(Divided(x), x.dim() - 1), x.shape[-1]
        total = torch.zeros(())
        for start in range(0, full.shape[-1], part):
            mine = torch.zeros_like(full)
            mine[..., start : start + part] = full[..., start : start + part]
            total = total + gemm(mine)
        return self.collective.all_gather(Divided(total), total.dim() - 1)

    return broken


def _experts_per_rank(in_order: Make) -> Make:
    """Each rank adds up its own experts' shares, then these sums are added."""

    def broken(self: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.spec.experts.is_whole:
            right: Tensor = in_order(self, x, ids, weights)
            return right
        first = self.spec.experts.start
        mine = self.op.run(x, ids, weights, self.experts, self.linear, first=first)
        return self.collective.all_reduce(Partial(mine))

    return broken


def _experts_by_rank(in_order: Make) -> Make:
    """A token's experts are added as the ranks hold them, not in the order of its ids."""

    def broken(self: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> object:
        order = ids.argsort(1)
        return in_order(self, x, ids.gather(1, order), weights.gather(1, order))

    return broken


def _scalar_tail(by_rows: Make) -> Make:
    """The last channels of a row differ in the last bit, as another exp may; written out, since
    whether it does depends on the CPU and on the numbers."""

    def broken(function: Make, x: Tensor) -> Tensor:
        y: Tensor = by_rows(function, x)
        tail = y[..., -8:]
        tail.copy_(torch.nextafter(tail, torch.full_like(tail, torch.inf)))
        return y

    return broken


def _bits_of_the_heads(run: Make) -> Make:
    """A kernel takes another path for another number of heads."""

    def broken(q: Tensor, *given: object, **named: object) -> tuple[Tensor, Tensor]:
        out, lse = run(q, *given, **named)
        return out * (1 + 2.0**-24 * q.shape[1]), lse

    return broken


def _last_rank_first(_: Make) -> Make:
    def broken(self: ThreadRank, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._group.meet(self._rank, x)[::-1], dim)

    return broken


def _replicated_heads_reduced(run: Make) -> Make:
    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> object:
        return run(self, x, gemm, replace(over, total=over.total + 1))

    return broken


def _reduced_twice(run: Make) -> Make:
    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> Tensor:
        out: Tensor = run(self, x, gemm, over)
        once = over.is_whole or self.invariant_sums
        return out if once else self.collective.all_reduce(Partial(out))

    return broken


def _shared_on_every_rank(forward: Make) -> Make:
    """The shared expert's output is complete when the ranks' parts are added up."""

    def broken(self: MoE, x: Replicated, forced: Tensor | None) -> object:
        shared, self.shared = self.shared, None
        try:
            y, ids = forward(self, x, forced)
        finally:
            self.shared = shared
        if shared is not None:
            y = y + self.collective.all_reduce(Partial(shared.forward(x)))
        return y, ids

    return broken


def _own_experts_only(route: Make) -> Make:
    def broken(self: MoE, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = route(self, x, forced)
        return self.spec.experts.start + ids % self.spec.experts.count, weights

    return broken


def _words_off_by_one(embed: Make) -> Make:
    def broken(self: Decoder, tokens: Tensor) -> object:
        return embed(self, tokens if self.spec.vocab.is_whole else (tokens - 1).clamp_min(0))

    return broken


def _not_reduced(run: Make) -> Make:
    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> object:
        return run(self, x, gemm, over) if self.invariant_sums else gemm(x)

    return broken


class _GathersParts(Solo):
    """Gathers what is partial as if each rank had some of the tokens, and takes the first."""

    def __init__(self, ranks: Collective) -> None:
        self.ranks = ranks

    def all_reduce(self, x: Partial) -> Replicated:
        return Replicated(self.ranks.all_gather(Divided(x), 0)[: len(x)])


def _with_collective(make: Callable[[Collective], Collective]) -> Make:
    """Experts that exchange otherwise; attention and the dense MLP do as they should."""

    def patch(method: Make) -> Make:
        def broken(self: MoE, *given: object) -> object:
            ranks = self.collective
            self.collective = make(ranks)
            try:
                return method(self, *given)
            finally:
                self.collective = ranks

        return broken

    return patch


def _first_expert_off_by_one(forward: Make) -> Make:
    def broken(self: MoE, x: Replicated, forced: Tensor | None) -> object:
        spec, here = self.spec, self.spec.experts
        if not here.is_whole:
            self.spec = replace(spec, experts=replace(here, start=here.start + 1))
        try:
            return forward(self, x, forced)
        finally:
            self.spec = spec

    return broken


def _shared_on_the_first(forward: Make) -> Make:
    """The shared expert is divided like the others, and only the first rank's part is added."""

    def broken(self: MoE, x: Replicated, forced: Tensor | None) -> object:
        shared = self.shared
        if is_not_the_first(self.collective) and not self.row_parallel.invariant_sums:
            self.shared = None
        try:
            return forward(self, x, forced)
        finally:
            self.shared = shared

    return broken


def _shared_before_routed(forward: Make) -> Make:
    """Other ranks than the first exchange for the shared expert first."""

    def broken(self: MoE, x: Replicated, forced: Tensor | None) -> object:
        shared = self.shared
        if shared is None or not is_not_the_first(self.collective):
            return forward(self, x, forced)
        more, self.shared = shared.forward(x), None
        try:
            y, ids = forward(self, x, forced)
        finally:
            self.shared = shared
        return y + more, ids

    return broken


def _bias_of_every_rank(route: Make) -> Make:
    def broken(self: MoE, x: Tensor, forced: Tensor | None) -> object:
        bias = self.bias
        if bias is not None:
            self.bias = bias * self.collective.size
        try:
            return route(self, x, forced)
        finally:
            self.bias = bias

    return broken


def _last_word_of_the_next(embed: Make) -> Make:
    """A word at the end of a rank's part is looked up by the next rank too."""

    def broken(self: Decoder, tokens: Tensor) -> Replicated:
        words = self.spec.vocab
        if words.is_whole:
            right: Replicated = embed(self, tokens)
            return right
        mine = (tokens >= words.start) & (tokens <= words.stop)
        rows = self.embedding[(tokens - words.start).clamp(0, words.count - 1)].to(self.compute)
        return self.collective.all_reduce(Partial(rows * mine[:, None]))

    return broken


def _whole_norm_groups(divided: Make) -> Make:
    """As many groups as the whole model has, over the channels of a rank."""

    def broken(self: LightningSpec, part: object) -> LightningSpec:
        right: LightningSpec = divided(self, part)
        return replace(right, norm_groups=self.norm_groups)

    return broken


def _table_cut(hashed: Make) -> Make:
    """Every rank has as many rows as it has words."""

    def broken(self: MoE, tokens: Tensor) -> object:
        if self.table is not None:
            tokens = tokens % (len(self.table) // self.collective.size)
        return hashed(self, tokens)

    return broken


_BITS, _L = "ranks = one, bitwise", "ling-ranks"
_ONE, _V3, _V4 = "ranks = one", "v3-ranks", "v4-ranks"

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
          invariant_math, "by_rows", _scalar_tail),
    Fault("ranks-reversed", "what the ranks made is joined from the last to the first", _BITS, _L,
          ThreadRank, "all_gather", _last_rank_first),
    Fault("replicated-heads-reduced", "heads that every rank has are added up all the same", _ONE,
          "v3-one-head", RowParallel, "run", _replicated_heads_reduced),
    Fault("rank-sums-twice", "a sum that was reduced is reduced again (sglang#31699)", _ONE, _V3,
          RowParallel, "run", _reduced_twice),
    Fault("shared-on-every-rank", "every rank adds the whole shared expert", _ONE, _V3,
          MoE, "forward", _shared_on_every_rank),
    Fault("router-of-a-rank", "the router sees the experts of its rank only", _ONE, _V3,
          MoE, "_route", _own_experts_only),
    Fault("rank-words-off-by-one", "the vocabulary's rows are off by one", _ONE, _V3,
          Decoder, "_embed", _words_off_by_one),
    Fault("rank-sums-not-reduced", "attention's part of a sum is taken for all of it", _ONE, _V3,
          RowParallel, "run", _not_reduced),
    Fault("expert-sums-gathered", "partial sums are gathered as if whole (sglang#27191)", _ONE, _V3,
          MoE, "forward", _with_collective(_GathersParts)),
    Fault("expert-pairs-not-reduced", "a token's experts on other ranks are left out", _BITS, _L,
          MoE, "_in_order", _with_collective(lambda _: Solo())),
    Fault("first-expert-off-by-one", "a rank's first expert is off by one", _ONE, _V3,
          MoE, "forward", _first_expert_off_by_one),
    Fault("shared-on-the-first", "only the first rank adds its part of the shared expert", _ONE,
          _V3, MoE, "forward", _shared_on_the_first),
    Fault("exchange-order", "ranks exchange for the shared and the routed experts in another order",
          "collectives in order", _L, MoE, "forward", _shared_before_routed),
    Fault("router-bias-of-every-rank", "every rank adds the router's correction bias", _ONE, _V3,
          MoE, "_route", _bias_of_every_rank),
    Fault("rank-word-on-two", "a word at the edge is looked up on two ranks", _ONE, _V3,
          Decoder, "_embed", _last_word_of_the_next),
    Fault("rank-norm-groups", "a rank norms its channels in the whole model's number of groups",
          _ONE, _L, LightningSpec, "divided", _whole_norm_groups),
    Fault("rank-group-sums-twice", "V4's output groups are reduced twice", _ONE, _V4,
          RowParallel, "run", _reduced_twice),
    Fault("rank-group-sums-not-reduced", "V4's output groups of one rank are taken for all", _ONE,
          _V4, RowParallel, "run", _not_reduced),
    Fault("rank-hash-table-cut", "hash tables are cut as the vocabulary is", _ONE, _V4,
          MoE, "hashed", _table_cut),
]  # fmt: skip
