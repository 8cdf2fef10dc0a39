"""Mistakes of models that run on several ranks: parts that are counted twice or not at all, slices
of another rank; and what changes the last bit only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trueline.layers.decoder import Decoder
from trueline.layers.feedforward import MoE
from trueline.models import parameters as model_parameters
from trueline.ops import invariant_math
from trueline.parallel.collective import RowParallel, ThreadRank
from trueline.spec.feedforward import MoESpec
from trueline.spec.parameters import Parameter, Piece
from trueline.spec.source import Span
from trueline.verify.faults import Fault, Make, Running
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.pack_int4 import Int4Stored


def _next_rank(span: Span) -> Span:
    start = span.stop % span.total
    return Span(start, start + span.count, span.total)


def _own_part_first(run: Make) -> Make:
    """Each rank sums over its own heads or width, then these sums are added."""

    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> Tensor:
        if not self.invariant_sums or over.is_whole:
            summed: Tensor = run(self, x, gemm, over)
            return summed
        full, part = self.collective.all_gather(x, x.dim() - 1), x.shape[-1]
        total = torch.zeros(())
        for start in range(0, full.shape[-1], part):
            mine = torch.zeros_like(full)
            mine[..., start : start + part] = full[..., start : start + part]
            total = total + gemm(mine)
        return self.collective.all_gather(total, total.dim() - 1)

    return broken


def _experts_per_rank(in_order: Make) -> Make:
    """Each rank adds up its own experts' shares, then these sums are added."""

    def broken(self: MoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.spec.experts.is_whole:
            right: Tensor = in_order(self, x, ids, weights)
            return right
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


def _first_scales(cut: Make) -> Make:
    """Numbers of a rank, with the scales of the first."""

    def broken(self: Fp8Stored, axis: int, start: int, stop: int) -> Fp8Stored:
        right: Fp8Stored = cut(self, axis, start, stop)
        return replace(right, scales=self.scales.narrow(axis, 0, right.scales.shape[axis]))

    return broken


def _scales_of_all_columns(cut: Make) -> Make:
    def broken(self: Int4Stored, axis: int, start: int, stop: int) -> Int4Stored:
        right: Int4Stored = cut(self, axis, start, stop)
        return replace(right, scales=self.scales) if axis == 1 else right

    return broken


def _up_from_gate(split: Make) -> Make:
    def broken(self: Piece) -> Iterator[Piece]:
        for run in split(self):
            yield replace(run, take=self.take) if self.runs == 2 else run

    return broken


def _experts_of_the_next(moe_parameters: Make) -> Make:
    def broken(moe: MoESpec, *rest: object) -> Iterator[Parameter]:
        experts = moe.experts if moe.experts.is_whole else _next_rank(moe.experts)
        yield from moe_parameters(replace(moe, experts=experts), *rest)

    return broken


def _down_of_the_next(output: Make) -> Make:
    def broken(name: str, D: int, inner: Span, outputs: Span | None) -> Parameter:
        other = outputs is None and "down_proj" in name and not inner.is_whole
        parameter: Parameter = output(name, D, _next_rank(inner) if other else inner, outputs)
        return parameter

    return broken


def _replicated_heads_reduced(run: Make) -> Make:
    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> object:
        return run(self, x, gemm, replace(over, total=over.total + 1))

    return broken


def _reduced_twice(run: Make) -> Make:
    def broken(self: RowParallel, x: Tensor, gemm: Make, over: Span) -> Tensor:
        out: Tensor = run(self, x, gemm, over)
        return out if over.is_whole or self.invariant_sums else self.collective.all_reduce(out)

    return broken


def _shared_on_every_rank(forward: Make) -> Make:
    """The shared expert's output is complete when the ranks' parts are added up."""

    def broken(self: MoE, x: Tensor, forced: Tensor | None) -> object:
        shared, self.shared = self.shared, None
        try:
            y, ids = forward(self, x, forced)
        finally:
            self.shared = shared
        return (y if shared is None else y + self.collective.all_reduce(shared.forward(x))), ids

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


_BITS, _L = "ranks = one, bitwise", "ling-ranks"
_ONE, _V3 = "ranks = one", "v3-ranks"

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
    Fault("rank-first-scales", "a rank's numbers have the scales of the first rank's", _ONE,
          "fp8-ranks", Fp8Stored, "cut", _first_scales),
    Fault("rank-scales-not-cut", "int4 scales are not cut along K (vllm#41511)", "rank ledger",
          "int4-all", Int4Stored, "cut", _scales_of_all_columns),
    Fault("rank-up-from-gate", "gate's rows are taken where up's should be", "rank ledger",
          "v3-ranks-fused", Piece, "split", _up_from_gate),
    Fault("rank-experts-of-the-next", "a rank holds the experts of the next one", _ONE, _V3,
          model_parameters, "_moe", _experts_of_the_next),
    Fault("rank-down-of-the-next", "down's columns are those of the next rank", _ONE, _V3,
          model_parameters, "output", _down_of_the_next),
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
]  # fmt: skip
