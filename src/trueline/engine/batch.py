"""A step's message as lists of numbers: which tokens, at which positions, into which cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trueline.cache.layout import cells
from trueline.cache.rows import BatchRow
from trueline.engine.messages import UNKNOWN, StepMessage


@dataclass(frozen=True, slots=True)
class SamplingPoint:
    """A token of the step after which a row samples, or whose value the step before samples."""

    token: int
    """Index into the step's tokens."""
    row: int
    id: int
    drafts: tuple[int, ...] = ()
    """Of the row, those before and at this token: what is sampled here counts only if each of them
    was accepted."""
    draft: int | None = None
    """What the row's next token was drafted as."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Prompt tokens of a row whose logprobs were asked for."""

    row: int
    id: int
    tokens: slice
    """The tokens before them, among the step's."""
    start: int
    """Position of the first of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    rows: tuple[BatchRow, ...]
    """Decode rows first."""
    tokens: list[int]
    positions: list[int]
    cells: list[list[int]]
    """By group of state kinds: where each token's cache row goes."""
    num_decode_rows: int
    carried: tuple[SamplingPoint, ...]
    """Where the token is UNKNOWN."""
    samples: tuple[SamplingPoint, ...]
    """Where logits give the next token."""
    scored: tuple[ScoredTokens, ...]

    @property
    def tokens_per_row(self) -> int | None:
        """None where rows have different numbers of tokens, or some are not decode rows."""
        if self.num_decode_rows != len(self.rows):
            return None
        counts = {row.count for row in self.rows}
        return counts.pop() if len(counts) == 1 else None


def build_batch(step: StepMessage, block_sizes: Sequence[int]) -> Batch:
    """`block_sizes`: by group of state kinds."""
    check_order(step)
    rows: list[BatchRow] = []
    tokens: list[int] = []
    positions: list[int] = []
    by_group: list[list[int]] = [[] for _ in block_sizes]
    for row in step.rows:
        stop = row.start + len(row.token_ids)
        rows.append(
            BatchRow(
                id=row.id,
                tokens=slice(len(tokens), len(tokens) + len(row.token_ids)),
                start=row.start,
                tables=row.tables,
                is_decode=row.is_decode,
                state=row.state,
            )
        )
        tokens += row.token_ids
        positions += range(row.start, stop)
        for places, size, table in zip(by_group, block_sizes, row.tables, strict=True):
            places += cells(size, table, row.start, stop)
    return Batch(
        rows=tuple(rows),
        tokens=tokens,
        positions=positions,
        cells=by_group,
        num_decode_rows=sum(row.is_decode for row in step.rows),
        carried=tuple(
            SamplingPoint(row.tokens.stop - 1, i, row.id)
            for i, row in enumerate(rows)
            if tokens[row.tokens.stop - 1] == UNKNOWN
        ),
        samples=tuple(_samples(step, rows)),
        scored=tuple(_scored(step, rows)),
    )


def _samples(step: StepMessage, rows: list[BatchRow]) -> Iterator[SamplingPoint]:
    """After the last known token of rows that reach it, and after each draft behind it."""
    for i, (row, at) in enumerate(zip(step.rows, rows, strict=True)):
        if row.samples:
            known = at.count - row.num_drafts
            drafts = tuple(row.token_ids[known:])
            for j in range(row.num_drafts + 1):
                draft = drafts[j] if j < len(drafts) else None
                yield SamplingPoint(at.tokens.start + known - 1 + j, i, row.id, drafts[:j], draft)


def _scored(step: StepMessage, rows: list[BatchRow]) -> Iterator[ScoredTokens]:
    for i, (row, at) in enumerate(zip(step.rows, rows, strict=True)):
        if row.num_scored:
            first = at.tokens.start
            yield ScoredTokens(i, row.id, slice(first, first + row.num_scored), row.start)


def check_order(step: StepMessage) -> None:
    """Decode rows first, one token and its drafts each: the scheduler's promise, checked once,
    here."""
    decode = [row.is_decode for row in step.rows]
    if decode != sorted(decode, reverse=True):
        raise AssertionError("decode rows must come first")
    for row in step.rows:
        if row.is_decode and (len(row.token_ids) != 1 + row.num_drafts or row.start == 0):
            raise AssertionError("a decode row has history, one token and its drafts")
        if row.num_drafts and not (row.is_decode and row.samples):
            raise AssertionError("only decode rows that sample have drafts")
