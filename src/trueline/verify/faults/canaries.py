"""Writes to memory that is another's or nobody's. Most change no number of the request that makes
them, and of others only if these still read there: canaries see them at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.cache.kinds import lightning
from trueline.cache.kinds.inputs import Column
from trueline.cache.pool import Pool
from trueline.cache.rows import BatchRow
from trueline.cache.slots import NULL_SLOT
from trueline.cache.store import LatentView
from trueline.cache.tails import TailView
from trueline.engine import graphs
from trueline.ops.lightning import StateRow
from trueline.verify.faults import Fault, Make


def _row_after_the_block(write: Make) -> Make:
    """A token that fills its block is written once more, to the block behind it (vllm#42971)."""

    def broken(self: LatentView, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        last = (cells + 1) % self.layout.block_size == 0
        write(self, cells[last] + 1, latent[last], rope[last])
        write(self, cells, latent, rope)

    return broken


def _over_the_zeros(write: Make) -> Make:
    """Also to the row that stands for what is masked."""

    def broken(self: LatentView, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        write(self, cells, latent, rope)
        write(self, torch.full_like(cells[-1:], self.zero_cell), latent[-1:], rope[-1:])

    return broken


def _past_the_pool(write: Make) -> Make:
    """Offsets that wrap around below zero: from the end of the memory."""

    def broken(self: LatentView, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        write(self, cells, latent, rope)
        write(self, self.zero_cell - cells[-1:], latent[-1:], rope[-1:])

    return broken


def _in_32_bits(write: Make) -> Make:
    """A key's address in bytes wraps around, as where it is computed in too few bits."""

    def broken(self: IndexView, cells: Tensor, keys: Tensor) -> None:
        write(self, cells, keys)
        count = len(self.bytes) // self.layout.token_bytes
        write(self, (cells[-1:] * 3 + count // 2) % count, keys[-1:])

    return broken


def _scale_of_the_key_after(write: Make) -> Make:
    """Scales are written eight bytes at a time."""

    def broken(self: IndexView, cells: Tensor, scales: Tensor) -> None:
        after = cells[(cells + 1) % self.layout.block_size == 0] + 1
        after = after[self.layout.scale_start(after) < len(self.bytes)]
        write(self, after, torch.zeros_like(after, dtype=torch.float32))
        write(self, cells, scales)

    return broken


def _tails_after(write: Make) -> Make:
    """The last position of a block is written again behind it."""

    def broken(self: TailView, at: Tensor, rows: Tensor) -> None:
        last = (at + 1) % self.layout.block_size == 0
        write(self, at[last] + 1, rows[last])
        write(self, at, rows)

    return broken


def _back_to_the_source(state_row: Make) -> Make:
    """The state after the row goes to the snapshot it started from, too."""

    def broken(row: BatchRow) -> StateRow:
        made: StateRow = state_row(row)
        if made.source in (None, made.slot):
            return made
        again = (row.start + row.count, made.source)
        return replace(made, snapshots=(*made.snapshots, again))

    return broken


def _null_slot_too(state_row: Make) -> Make:
    """As a dummy row does on an idle rank (vllm#37728): nobody starts from it."""

    def broken(row: BatchRow) -> StateRow:
        made: StateRow = state_row(row)
        return replace(made, snapshots=(*made.snapshots, (row.start + row.count, NULL_SLOT)))

    return broken


def _given_twice(take: Make) -> Make:
    """A place that was taken is free still, once."""
    told: list[int] = []

    def broken(self: Pool) -> int:
        place: int = take(self)
        if place == 10 and not told:
            told.append(place)
            self._blank.append(place)
        return place

    return broken


def _padded_elsewhere(column: Column) -> Column:
    """Padded rows write a block that nobody has, or not yet."""
    return Column(column.dtype, padding=5 * 300)


_C, _V3, _V32, _V4, _L = "canaries", "v3", "v32", "v4-small", "ling"

CANARY_FAULTS = [
    Fault("latent-behind-the-block", "a token that fills its block is written behind it too",
          _C, _V3, LatentView, "write", _row_after_the_block),
    Fault("latent-over-the-zeros", "the row of zeros is written", _C, _V3,
          LatentView, "write", _over_the_zeros),
    Fault("latent-from-the-end", "a token is written from the end of the memory too", _C, _V3,
          LatentView, "write", _past_the_pool),
    Fault("block-given-twice", "two requests are given one block", _C, _V3,
          Pool, "_take", _given_twice),
    Fault("key-address-wraps", "an index key is also written where its address wraps around",
          _C, _V32, IndexView, "write", _in_32_bits),
    Fault("scale-after", "scales are written two at a time, also behind the block", _C,
          "v32-block-1", IndexView, "_write_scales", _scale_of_the_key_after),
    Fault("tails-behind-the-block", "a compressor's last row of a block is written behind it too",
          _C, _V4, TailView, "write", _tails_after),
    Fault("entry-behind-the-block", "an entry that fills its block is written behind it too",
          _C, _V4, LatentView, "write", _row_after_the_block),
    Fault("snapshot-written-again", "the snapshot that a request starts from takes its state",
          _C, _L, lightning, "state_row", _back_to_the_source),
    Fault("null-slot-written", "rows that are not padding write the null slot", _C, _L,
          lightning, "state_row", _null_slot_too),
    Fault("padded-rows-elsewhere", "padded rows write a block that nobody has", "graph = eager",
          "v3-shallow", graphs, "CELLS", _padded_elsewhere),
]  # fmt: skip
