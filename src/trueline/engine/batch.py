"""A scheduled step as lists of numbers: which tokens, at which positions, into which cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trueline.cache.layout import LatentLayout
from trueline.engine.step import Row, Step
from trueline.ops.lightning import StateRow
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.mla_prefill import PrefillRow
from trueline.ops.sparse_rows import Run, SparseRows

UNKNOWN = -1
"""Stands for a token that the step before samples; the runner puts it in."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Prompt tokens whose logprobs were asked for: those after each of `tokens`."""

    request_id: str
    tokens: slice
    start: int


@dataclass(frozen=True, slots=True)
class Batch:
    rows: tuple[tuple[str, slice, int], ...]
    """(request, where its tokens stand, position of the first): decode rows first."""
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
    """Tokens that see more than the indexer lets through, however they were scheduled."""
    prefill: tuple[tuple[slice, PrefillRow], ...]
    states: tuple[tuple[slice, StateRow], ...]
    """The rows again, for mixers with a state per sequence; the first `num_decode_rows` decode."""
    num_decode_rows: int
    carried: tuple[tuple[int, str], ...]
    """(index into tokens, request) where the token is UNKNOWN."""
    samples: tuple[tuple[int, str], ...]
    """(index into tokens, request) where logits give the next token."""
    scored: tuple[ScoredPrompt, ...]
    forget: tuple[str, ...]
    """Requests that have ended since the step before."""


def build_batch(
    step: Step,
    known: Mapping[str, list[int]],
    scored: Mapping[str, int],
    layout: LatentLayout,
    *,
    one_form: bool,
    topk: int | None = None,
    forget: tuple[str, ...] = (),
) -> Batch:
    """`known`: each request's tokens whose values are known. `scored`: prompt lengths of requests
    that want prompt logprobs. With `one_form` every token is a row of its own, attended in the
    same way however it was scheduled. Tokens that see more than `topk` positions choose among
    them."""
    check_order(step)
    rows: list[tuple[str, slice, int]] = []
    held: list[list[int]] = []
    tokens: list[int] = []
    positions: list[int] = []
    cells: list[int] = []
    decode = DecodeRows([], [])
    decode_tokens: list[int] = []
    runs: list[Run] = []
    sparse_tokens: list[int] = []
    prefill: list[tuple[slice, PrefillRow]] = []
    states: list[tuple[slice, StateRow]] = []
    carried: list[tuple[int, str]] = []
    samples: list[tuple[int, str]] = []
    wanted: list[ScoredPrompt] = []
    for row in step.rows:
        name, stop = row.request.request_id, row.start + row.count
        blocks = list(row.request.block_ids)  # the scheduler may change them afterwards
        at = slice(len(tokens), len(tokens) + row.count)
        rows.append((name, at, row.start))
        held.append(blocks)
        values = known[name][row.start : stop]
        if len(values) < row.count:
            carried.append((at.stop - 1, name))
            values = [*values, UNKNOWN]
        tokens += values
        positions += range(row.start, stop)
        cells += layout.cells(blocks, row.start, stop)
        dense = row.count if topk is None else min(max(topk - row.start, 0), row.count)
        cut = at.start + dense
        if dense and (row.is_decode or one_form):
            decode.lengths.extend(range(row.start + 1, row.start + dense + 1))
            decode.block_ids.extend([blocks] * dense)
            decode_tokens += range(at.start, cut)
        elif dense:
            prefill.append((slice(at.start, cut), PrefillRow(row.start, dense, blocks)))
        if dense < row.count:
            runs.append(Run(blocks, row.start + dense + 1, row.count - dense))
            sparse_tokens += range(cut, at.stop)
        if row.state is not None:
            state = row.state
            states.append((at, StateRow(row.start, state.source, state.slot, state.snapshots)))
        if row.samples:
            samples.append((at.stop - 1, name))
        if name in scored and row.start < scored[name] - 1:
            wanted.append(_scored(row, at, scored[name]))
    return Batch(
        tuple(rows),
        tuple(held),
        tokens,
        positions,
        cells,
        decode,
        decode_tokens,
        SparseRows(tuple(runs)),
        sparse_tokens,
        tuple(prefill),
        tuple(states),
        step.num_decode_rows,
        tuple(carried),
        tuple(samples),
        tuple(wanted),
        forget,
    )


def _scored(row: Row, at: slice, prompt_len: int) -> ScoredPrompt:
    """All positions of the row that have a next prompt token."""
    count = min(row.count, prompt_len - 1 - row.start)
    return ScoredPrompt(row.request.request_id, slice(at.start, at.start + count), row.start)


def check_order(step: Step) -> None:
    """Decode rows first, one token each: the scheduler's promise, checked once, here."""
    kinds = [row.is_decode for row in step.rows]
    if kinds != sorted(kinds, reverse=True) or sum(kinds) != step.num_decode_rows:
        raise AssertionError("decode rows must come first")
    if any(row.count != 1 or row.start == 0 for row in step.rows if row.is_decode):
        raise AssertionError("a decode row has history and one token")
