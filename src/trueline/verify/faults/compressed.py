"""Faults of compressed attention in the engine: its kinds, block groups and layers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from torch import Tensor

from trueline.cache import groups
from trueline.cache.blocks import NULL_BLOCK, BlockPool
from trueline.cache.groups import BlockGroups
from trueline.cache.kinds.tails import TailInputs
from trueline.cache.kinds.window import WindowInputs
from trueline.cache.rows import BatchRow
from trueline.layers.compressed import Compressed
from trueline.layers.feedforward import MoE
from trueline.layers.ropes import Ropes
from trueline.ops.compress import CompressRows
from trueline.ops.sink_prepare import Rotation
from trueline.ops.sparse_rows import Run
from trueline.spec.mixer import CompressedSpec
from trueline.spec.rope import yarn_magnitude
from trueline.verify.faults import Fault, Make


def _no_tails(found: Make) -> Make:
    def broken(pool: BlockPool, names: Sequence[bytes], num_tokens: int) -> object:
        if pool.window_step == 1:
            return found(pool, names, num_tokens)
        return [NULL_BLOCK] * (num_tokens // pool.block_size)

    return broken


def _tails_given_away(first: Make) -> Make:
    def broken(self: BlockPool, position: int) -> object:
        early = self.window_step if self.window_step > 1 else 0
        return first(self, position + early)

    return broken


def _open_block_not_kept(placed: Make) -> Make:
    def broken(self: BlockGroups, pool: BlockPool, *given: object) -> object:
        made = placed(self, pool, *given)
        return [*made[:-1], False] if pool.keeps_ends and made else made

    return broken


def _anothers_tails(read: Make) -> Make:
    def broken(self: TailInputs, rows: Sequence[BatchRow]) -> object:
        made = read(self, rows)
        tables = [run.tails for run in made.runs]
        longest = max(tables, key=len)
        return replace(made, runs=tuple(replace(run, tails=longest) for run in made.runs))

    return broken


def _other_window(by: int) -> Make:
    def of(build: Make) -> Make:
        def broken(self: WindowInputs, *given: object) -> object:
            wrong = copy(self)
            wrong.kind = replace(self.kind, size=self.kind.size + by)
            return build(wrong, *given)

        return broken

    return of


def _not_rotated_back(attend: Make) -> Make:
    def broken(self: Compressed, *given: object) -> object:
        rope = given[-1]
        assert isinstance(rope, Rotation)
        return self.op.sink_prepare.rotate(attend(self, *given), rope=rope)

    return broken


def _with_mscale(_: object) -> object:
    def scale(self: CompressedSpec) -> float:
        yarn = self.rope.yarn
        return float(self.head_dim**-0.5 * (yarn_magnitude(yarn.factor, 1.0) ** 2 if yarn else 1))

    return property(scale)


def _first_table(hashed: Make) -> Make:
    tables: list[Tensor] = []

    def broken(self: MoE, tokens: Tensor) -> object:
        if self.table is None:
            return None
        tables.append(self.table)
        return tables[0][tokens]

    return broken


def _seen(early: int) -> Make:
    """An entry is visible so many tokens early; below zero, late."""

    def of(length: Make) -> Make:
        def broken(self: Run, row: int) -> object:
            by = early if self.ratio > 1 else 0
            return length(replace(self, first=self.first + by), row)

        return broken

    return of


ORACLE, PREFIX = "engine oracle", "prefix = cold"
CASE = "v4-small"

COMPRESSED_FAULTS = [
    Fault("tails-not-restored", "after a prefix hit compressors start from nothing", PREFIX, CASE,
          groups, "_in_window", _no_tails),
    Fault("tails-of-a-reused-block", "tails are given away one window early", ORACLE, CASE,
          BlockPool, "first_read", _tails_given_away),
    Fault("tails-of-an-open-block", "what is open at a chunk's end is not kept", ORACLE, CASE,
          BlockGroups, "_placed", _open_block_not_kept),
    Fault("tails-of-another", "compressors read the tails of another sequence", ORACLE, CASE,
          TailInputs, "read", _anothers_tails),
    Fault("entry-block-off", "entries go to the block before theirs", ORACLE, CASE,
          CompressRows, "entry_cells",
          lambda cells: lambda self, ratio, size: cells(self, ratio, size) - size),
    Fault("window-one-short", "a query sees one position less of the window", ORACLE, CASE,
          WindowInputs, "build", _other_window(-1)),
    Fault("window-one-long", "a query sees one position more of the window", ORACLE, CASE,
          WindowInputs, "build", _other_window(1)),
    Fault("entry-one-late", "an entry is visible one token late", ORACLE, CASE,
          Run, "length", _seen(-1)),
    Fault("entry-one-early", "an entry is visible one token early", ORACLE, CASE,
          Run, "length", _seen(1)),
    Fault("one-rope-for-both-kinds", "compressed layers rotate as window layers do", ORACLE, CASE,
          Ropes, "at", lambda at: lambda self, p: [at(self, p)[0]] * len(self.of_layer)),
    Fault("not-rotated-back", "the output keeps the rotation of its keys", ORACLE, CASE,
          Compressed, "_attend", _not_rotated_back),
    Fault("engine-v4-mscale", "V4's softmax scale with YaRN's mscale", ORACLE, CASE,
          CompressedSpec, "softmax_scale", _with_mscale),
    Fault("hash-table-of-another-layer", "hash layers share the first one's table", ORACLE, CASE,
          MoE, "hashed", _first_table),
]  # fmt: skip
