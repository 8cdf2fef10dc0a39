"""A step's message as lists of numbers: which tokens, at which positions, into which cells."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.cache.layout import LatentLayout
from trueline.engine.messages import UNKNOWN, StepMessage
from trueline.ops.lightning import StateRow
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_prefill import PrefillRow
from trueline.ops.sparse_rows import Run, SparseRows


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Where a row's tokens stand among the step's tokens."""

    id: int
    tokens: slice
    start: int
    """Position of the first."""


@dataclass(frozen=True, slots=True)
class SamplingPoint:
    """A token of the step after which a row samples, or whose value the step before samples."""

    token: int
    """Index into the step's tokens."""
    row: int
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    rows: tuple[BatchRow, ...]
    """Decode rows first."""
    blocks: tuple[list[int], ...]
    """Of each row's request."""
    tokens: list[int]
    positions: list[int]
    cells: list[int]
    decode: DecodeRows
    decode_tokens: list[int]
    """Where its rows stand among the tokens."""
    sparse: SparseRows
    sparse_tokens: list[int]
    """Tokens that see more than the indexer's top-k, however they were scheduled."""
    prefill: tuple[tuple[slice, PrefillRow], ...]
    states: tuple[tuple[slice, StateRow], ...]
    """The rows again, for mixers with a state per sequence; the first `num_decode_rows` decode."""
    num_decode_rows: int
    carried: tuple[SamplingPoint, ...]
    """Where the token is UNKNOWN."""
    samples: tuple[SamplingPoint, ...]
    """Where logits give the next token."""
    scored: tuple[tuple[int, BatchRow], ...]
    """(row, leading positions of it): prompt tokens whose logprobs were asked for."""


def build_batch(
    step: StepMessage, layout: LatentLayout, *, one_form: bool, topk: int | None = None
) -> Batch:
    """With `one_form` every token is a row of its own, attended in the same way however it was
    scheduled. Tokens that see more than `topk` positions choose among them."""
    check_order(step)
    rows: list[BatchRow] = []
    tokens: list[int] = []
    positions: list[int] = []
    cells: list[int] = []
    decode = DecodeRows([], [])
    decode_tokens: list[int] = []
    runs: list[Run] = []
    sparse_tokens: list[int] = []
    prefill: list[tuple[slice, PrefillRow]] = []
    states: list[tuple[slice, StateRow]] = []
    for row in step.rows:
        count, blocks = len(row.token_ids), row.tables[0]
        stop = row.start + count
        at = slice(len(tokens), len(tokens) + count)
        rows.append(BatchRow(row.id, at, row.start))
        tokens += row.token_ids
        positions += range(row.start, stop)
        cells += layout.cells(blocks, row.start, stop)
        dense = count if topk is None else min(max(topk - row.start, 0), count)
        cut = at.start + dense
        if dense and (row.is_decode or one_form):
            decode.lengths.extend(range(row.start + 1, row.start + dense + 1))
            decode.block_ids.extend([blocks] * dense)
            decode_tokens += range(at.start, cut)
        elif dense:
            prefill.append((slice(at.start, cut), PrefillRow(row.start, dense, blocks)))
        if dense < count:
            runs.append(Run(blocks, row.start + dense + 1, count - dense))
            sparse_tokens += range(cut, at.stop)
        if row.state is not None:
            state = row.state
            states.append((at, StateRow(row.start, state.source, state.slot, state.snapshots)))
    return Batch(
        rows=tuple(rows),
        blocks=tuple(row.tables[0] for row in step.rows),
        tokens=tokens,
        positions=positions,
        cells=cells,
        decode=decode,
        decode_tokens=decode_tokens,
        sparse=SparseRows(tuple(runs)),
        sparse_tokens=sparse_tokens,
        prefill=tuple(prefill),
        states=tuple(states),
        num_decode_rows=sum(row.is_decode for row in step.rows),
        carried=_points(rows, [row.token_ids[-1] == UNKNOWN for row in step.rows]),
        samples=_points(rows, [row.samples for row in step.rows]),
        scored=_scored(step, rows),
    )


def _points(rows: list[BatchRow], chosen: list[bool]) -> tuple[SamplingPoint, ...]:
    """The last tokens of these rows."""
    return tuple(
        SamplingPoint(row.tokens.stop - 1, i, row.id) for i, row in enumerate(rows) if chosen[i]
    )


def _scored(step: StepMessage, rows: list[BatchRow]) -> tuple[tuple[int, BatchRow], ...]:
    return tuple(
        (i, BatchRow(row.id, slice(at.tokens.start, at.tokens.start + row.num_scored), at.start))
        for i, (row, at) in enumerate(zip(step.rows, rows, strict=True))
        if row.num_scored
    )


def check_order(step: StepMessage) -> None:
    """Decode rows first, one token each: the scheduler's promise, checked once, here."""
    kinds = [row.is_decode for row in step.rows]
    if kinds != sorted(kinds, reverse=True):
        raise AssertionError("decode rows must come first")
    if any(len(row.token_ids) != 1 or row.start == 0 for row in step.rows if row.is_decode):
        raise AssertionError("a decode row has history and one token")
