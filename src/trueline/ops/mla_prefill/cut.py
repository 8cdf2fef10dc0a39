"""How prefill rows are cut on a GPU: chunks of keys that fit the workspace, and tiles of queries
over each chunk. The host knows all lengths, so the lists are made here and copied once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from trueline import device
from trueline.ops.capabilities import Context, HeadDims
from trueline.ops.launch import copied, power_of_two
from trueline.ops.mla_prefill import Part

# Keys made at a time: as many as fit, but no more than keep the machine busy.
WORKSPACE_BYTES = 512 << 20
MOST_KEYS = 16384
SHARED_BYTES = 220 << 10
# Of the warp-specialised kernel (hopper.py): queries and keys of a tile, and the fewest columns of
# an operand.
HOPPER_QUERIES = 128
HOPPER_KEYS = 128
HOPPER_COLUMNS = 64
# Positions that a program gathers.
GATHERED = 16
# Rows of chosen positions listed together.
PICKED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunchPlan:
    queries: int
    keys: int
    warps: int
    stages: int
    heads: int
    """Worked on at the same time; a divisor of all there are."""
    workspace: int
    """Positions whose keys and values are made at a time."""


def launch(heads: HeadDims, rope: int, dtype: torch.dtype) -> PrefillLaunchPlan:
    count, nope, value, itemsize = heads.count, heads.nope, heads.value, dtype.itemsize
    most = WORKSPACE_BYTES // (count * (nope + value) * itemsize)
    workspace = max(min(most, MOST_KEYS) // 64, 1) * 64
    group = 8 if count % 8 == 0 else count
    if dtype == torch.float32:  # no tensor cores: what fits into registers
        return PrefillLaunchPlan(
            queries=16, keys=16, warps=8, stages=1, heads=group, workspace=workspace
        )
    queries, keys, stages = 128, 64, 3
    query = itemsize * (power_of_two(nope) + power_of_two(rope))
    key = query + itemsize * power_of_two(value)
    while keys > 16 and queries * query + stages * keys * key > SHARED_BYTES:
        keys //= 2
    return PrefillLaunchPlan(
        queries=queries, keys=keys, warps=8, stages=stages, heads=group, workspace=workspace
    )


def hopper_launch(heads: HeadDims, rope: int, dtype: torch.dtype) -> PrefillLaunchPlan:
    portable = launch(heads, rope, dtype)
    return replace(portable, queries=HOPPER_QUERIES, keys=HOPPER_KEYS, warps=4, stages=2)


def hopper_refusals(context: Context) -> list[str]:
    """Of hopper.py's kernel."""
    refusals = device.hopper_refusals(context.compute_capability)
    if refusals or context.heads is None or context.latent is None:
        return refusals
    nope, rope, value = context.heads.nope, context.latent.rope, context.heads.value
    if any(dim != power_of_two(dim) or dim < HOPPER_COLUMNS for dim in (nope, rope, value)):
        return [
            f"needs widths of a head that are powers of two from {HOPPER_COLUMNS} on, "
            f"not {nope} + {rope} and {value}"
        ]
    query = context.dtype.itemsize * (nope + rope)
    key = query + context.dtype.itemsize * value
    taken = HOPPER_QUERIES * query + 2 * HOPPER_KEYS * key
    return [] if taken <= SHARED_BYTES else [f"needs {taken} bytes of shared memory for a program"]


class Tile(NamedTuple):
    """A tile of queries over a chunk of keys, as the kernel reads it."""

    token: int
    """The first query's place among the step's tokens."""
    queries: int
    position: int
    """Of the first query."""
    key: int
    """Where the chunk begins in the workspace, at which position, and how long it is."""
    first: int
    keys: int
    resumes: int
    """Whether chunks before this one have left a state; whether the result is left to more."""
    finishes: int

    @property
    def seen(self) -> int:
        return min(self.position + self.queries - self.first, self.keys)


@dataclass(slots=True)
class KeyChunk:
    """What is worked on at a time, in one workspace."""

    total: int = 0
    places: list[int] = field(default_factory=list)  # four numbers each: see `kernels.gather`
    tiles: list[Tile] = field(default_factory=list)


class Lists(NamedTuple):
    total: int
    places: Tensor  # [programs of gather, 4]
    tiles: Tensor  # [tiles, 8]


@dataclass(frozen=True, slots=True)
class Cut:
    plan: PrefillLaunchPlan
    blocks: Tensor
    chunks: list[Lists]
    state: slice
    """Tokens whose keys take more than one chunk."""


def cut(parts: Sequence[Part], plan: PrefillLaunchPlan) -> tuple[list[int], list[KeyChunk], slice]:
    """Rows longer than the workspace are cut at multiples of it; others stay whole."""
    blocks: list[int] = []
    chunks: list[KeyChunk] = [KeyChunk()]
    long = [part.tokens for part in parts if part.row.start + part.row.count > plan.workspace]
    for part in parts:
        row = part.row
        end = row.start + row.count
        if chunks[-1].total + end > plan.workspace and chunks[-1].total:
            chunks.append(KeyChunk())
        for first in range(0, end, plan.workspace):
            if first:
                chunks.append(KeyChunk())
            keys = min(end - first, plan.workspace)
            _add(chunks[-1], part, first, keys, len(blocks), plan)
        blocks += row.block_ids
    for chunk in chunks:
        chunk.tiles.sort(key=lambda tile: -tile.seen)  # the longest first: the short fill up
    state = slice(min(t.start for t in long), max(t.stop for t in long)) if long else slice(0, 0)
    return blocks, chunks, state


def _add(
    chunk: KeyChunk, part: Part, first: int, keys: int, table: int, plan: PrefillLaunchPlan
) -> None:
    row, base = part.row, chunk.total
    for at in range(0, keys, GATHERED):
        chunk.places += (table, first + at, min(GATHERED, keys - at), base + at)
    for query in range(0, row.count, plan.queries):
        queries = min(plan.queries, row.count - query)
        position = row.start + query
        last = position + queries - 1
        if last >= first:
            chunk.tiles.append(
                Tile(
                    *(part.tokens.start + query, queries, position, base, first, keys),
                    *(int(first > 0), int(last < first + keys)),
                )
            )
    chunk.total += keys


def lists(parts: Sequence[Part], plan: PrefillLaunchPlan, where: torch.device) -> Cut:
    """The same on the device, in one copy."""
    blocks, chunks, state = cut(parts, plan)
    columns = [blocks]
    for chunk in chunks:
        columns += [chunk.places, [number for tile in chunk.tiles for number in tile]]
    there, *sent = copied(columns, where)
    made = [
        Lists(chunk.total, places.view(-1, 4), tiles.view(-1, len(Tile._fields)))
        for chunk, places, tiles in zip(chunks, sent[::2], sent[1::2], strict=True)
    ]
    return Cut(plan, there, made, state)


def picks(parts: Sequence[Part]) -> list[int]:
    """The rows of chosen positions, four numbers for PICKED of them: see `kernels.set_bits`."""
    made: list[int] = []
    for part in parts:
        for at in range(0, part.row.count, PICKED):
            made += (part.tokens.start + at, part.chosen + at, part.row.start + at + 1)
            made.append(min(PICKED, part.row.count - at))
    return made
