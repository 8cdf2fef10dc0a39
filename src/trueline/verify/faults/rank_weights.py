"""Mistakes in what a rank loads: slices of another rank, scales cut otherwise than numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trueline.models import parameters as model_parameters
from trueline.spec import shard
from trueline.spec.feedforward import MoESpec
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter, Piece
from trueline.spec.source import Span
from trueline.verify.faults import Fault, Make
from trueline.weights.formats.block_fp8 import Fp8Stored
from trueline.weights.formats.pack_int4 import WORD, Int4Stored


def _next_rank(span: Span) -> Span:
    start = span.stop % span.total
    return Span(start, start + span.count, span.total)


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


def _gate_and_up_as_one(split: Make) -> Make:
    """A rank takes one run of rows of both, right on one rank only."""

    def broken(self: Piece) -> Iterator[Piece]:
        if self.runs != 2:
            yield from split(self)
            return
        *outer, rows = self.take
        take, put = slice(2 * rows.start, 2 * rows.stop), slice(0, 2 * (rows.stop - rows.start))
        every = (slice(None),) * len(outer)
        yield replace(self, take=(*outer, take), put=(*every, put), runs=1)

    return broken


def _experts_of_the_next(moe_parameters: Make) -> Make:
    def broken(moe: MoESpec, *rest: object) -> Iterator[Parameter]:
        experts = moe.experts if moe.experts.is_whole else _next_rank(moe.experts)
        yield from moe_parameters(replace(moe, experts=experts), *rest)

    return broken


def _columns_of_the_next(part: str) -> Make:
    def patch(output: Make) -> Make:
        def broken(name: str, D: int, inner: Span, outputs: Span | None) -> Parameter:
            other = outputs is None and part in name and not inner.is_whole
            parameter: Parameter = output(name, D, _next_rank(inner) if other else inner, outputs)
            return parameter

        return broken

    return patch


def _expert_counts(more: int) -> Make:
    """Every rank but the last ends so many experts later than the next begins."""

    def patch(local_spec: Make) -> Make:
        def broken(*given: object) -> ModelSpec:
            local: ModelSpec = local_spec(*given)
            moe = {
                id(layer.feed_forward): replace(layer.feed_forward, experts=_longer(each, more))
                for layer in local.layers
                if isinstance(layer.feed_forward, MoESpec)
                and not (each := layer.feed_forward.experts).is_whole
            }
            return replace(
                local,
                layers=tuple(
                    replace(layer, feed_forward=moe.get(id(layer.feed_forward), layer.feed_forward))
                    for layer in local.layers
                ),
            )

        return broken

    return patch


def _longer(span: Span, more: int) -> Span:
    return replace(span, stop=span.stop + more) if span.stop < span.total else span


def _rows_of_the_next(part: str) -> Make:
    def patch(divided: Make) -> Make:
        def broken(name: str, dims: tuple[Span | int, ...], dim: int, **more: object) -> Parameter:
            rows = dims[0]
            if part in name and isinstance(rows, Span) and not rows.is_whole:
                dims = (_next_rank(rows), *dims[1:])
            parameter: Parameter = divided(name, dims, dim, **more)
            return parameter

        return broken

    return patch


def _groups_from_the_cut(cut: Make) -> Make:
    """Scales belong to groups that are counted from a rank's first column on, not the file's."""

    def broken(self: Int4Stored, axis: int, start: int, stop: int) -> Int4Stored:
        right: Int4Stored = cut(self, axis, start, stop)
        if axis == 0:
            return right
        skipped = right.first // WORD
        return replace(right, packed=right.packed[:, skipped:], first=right.first % WORD)

    return broken


def _blocks_from_the_cut(cut: Make) -> Make:
    def broken(self: Fp8Stored, axis: int, start: int, stop: int) -> Fp8Stored:
        right: Fp8Stored = cut(self, axis, start, stop)
        return replace(right, first=(0, 0))

    return broken


_ONE, _LEDGER, _V3, _V4 = "ranks = one", "rank ledger", "v3-ranks", "v4-ranks"

RANK_WEIGHT_FAULTS = [
    Fault("rank-first-scales", "a rank's numbers have the scales of the first rank's", _ONE,
          "fp8-ranks", Fp8Stored, "cut", _first_scales),
    Fault("rank-scales-not-cut", "int4 scales are not cut along K (vllm#41511)", _LEDGER,
          "int4-all", Int4Stored, "cut", _scales_of_all_columns),
    Fault("rank-up-from-gate", "gate's rows are taken where up's should be", _LEDGER,
          "v3-ranks-fused", Piece, "split", _up_from_gate),
    Fault("rank-gate-up-as-one", "fused gate and up are cut as one matrix", _ONE, "v3-ranks-fused",
          Piece, "split", _gate_and_up_as_one),
    Fault("rank-experts-of-the-next", "a rank holds the experts of the next one", _ONE, _V3,
          model_parameters, "_moe", _experts_of_the_next),
    Fault("rank-down-of-the-next", "down's columns are those of the next rank", _ONE, _V3,
          model_parameters, "output", _columns_of_the_next("down_proj")),
    Fault("expert-on-two-ranks", "two ranks hold an expert, which counts twice", _LEDGER, _V3,
          shard, "_local_spec", _expert_counts(1)),
    Fault("expert-on-no-rank", "an expert is on no rank", _LEDGER, _V3,
          shard, "_local_spec", _expert_counts(-1)),
    Fault("head-words-of-the-next", "logits of a rank's words are those of the next", _ONE, _V3,
          model_parameters, "divided", _rows_of_the_next("lm_head")),
    Fault("rank-kv-heads-of-the-next", "kv_b_proj is of the next rank's heads", _ONE, _V3,
          model_parameters, "divided", _rows_of_the_next("kv_b_proj")),
    Fault("rank-groups-from-the-cut", "int4 groups are counted from a rank's first column on", _ONE,
          "int4-ranks", Int4Stored, "cut", _groups_from_the_cut),
    Fault("rank-blocks-from-the-cut", "fp8 blocks are counted from a rank's first row and column",
          _ONE, "fp8-ranks", Fp8Stored, "cut", _blocks_from_the_cut),
    Fault("rank-sinks-of-the-next", "a rank's heads have the sinks of the next one's", _ONE, _V4,
          model_parameters, "divided", _rows_of_the_next("sinks")),
    Fault("rank-groups-of-the-next", "output groups go through the next rank's o_a_proj", _ONE, _V4,
          model_parameters, "divided", _rows_of_the_next("o_a_proj")),
    Fault("rank-group-columns-of-the-next", "o_b_proj's columns are those of the next rank", _ONE,
          _V4, model_parameters, "output", _columns_of_the_next("o_b_proj")),
]  # fmt: skip
