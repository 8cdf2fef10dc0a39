"""How a cached row lies in memory. Writers and readers take it from here; nobody guesses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One row per position: [latent after its norm | rotated key]. A block is `block_size` rows
    that follow each other; a cell is a row's address."""

    latent: int
    rope: int
    block_size: int

    @property
    def width(self) -> int:
        return self.latent + self.rope

    def cell(self, block_id: int, position: int) -> int:
        return block_id * self.block_size + position % self.block_size

    def cells(self, block_ids: list[int], start: int, stop: int) -> list[int]:
        """Addresses of positions start..stop of a sequence with these blocks."""
        size = self.block_size
        return [block_ids[p // size] * size + p % size for p in range(start, stop)]
