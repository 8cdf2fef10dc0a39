"""Blocks of the paged cache: a fixed run of positions each, shared by requests with equal prefixes.

Only full blocks get a hash, and a full block is never written again. pool.py has a block's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Final

from trueline.cache.pool import NULL, Pool, PoolError

NULL_BLOCK: Final = NULL


def first_read(position: int, window: int | None, window_step: int) -> int:
    """The first position that a query at `position`, or a later one, reads."""
    if window is None:
        return 0
    end = (position // window_step + 1) * window_step
    return max(end - window, 0)


def most_touched(block_size: int, window: int, window_step: int, count: int = 1) -> int:
    """Blocks that hold `count` positions and what the first of them reads, wherever it is: most
    where it ends a step of the window, and what it reads begins as late as may be in a block."""
    apart = gcd(block_size, window_step)
    late = block_size - apart + -window % apart
    return (late + window - 1 + count - 1) // block_size + 1


class BlockPool(Pool):
    """`num_blocks` blocks of `block_size` positions, the null block included."""

    noun = "block"

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        window: int | None = None,
        window_step: int = 1,
        keeps_ends: bool = False,
    ) -> None:
        super().__init__(num_blocks)
        if block_size < 1:
            raise PoolError(f"block_size={block_size}: a block has at least 1 position")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window = window
        """Positions that a query sees, itself included; None: all before it."""
        self.window_step = window_step
        """The window ends at the next multiple of it, and so moves by as many positions."""
        self.keeps_ends = keeps_ends
        """Of what a step writes, only what later steps may read gets a block."""
        self.generation = 0
        """Grows with every reset; what was computed under an older one must not be registered."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def first_read(self, position: int) -> int:
        """The first position that a query at `position`, or a later one, reads."""
        return first_read(position, self.window, self.window_step)

    def num_idle(self, ids: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them lowers `num_free` by as many."""
        return sum(self._references[block_id] == 0 for block_id in ids)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest cached prefix of a hash chain. Takes no reference and counts nothing: a
        request may ask many times before it is admitted."""
        found: list[int] = []
        for value in hashes:
            block_id = self.find(value)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Account for an admission that read the prefix cache."""
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    def register(self, place: int, value: bytes) -> None:
        if self.enable_prefix_caching:
            super().register(place, value)

    def reset_prefix_cache(self) -> None:
        """Forget all contents, as after a change of weights. Holders keep their blocks, but what
        they computed belongs to the old `generation` and must not be registered again."""
        self.generation += 1
        self.forget_all()

    def _facts(self) -> dict[str, bool]:
        return super()._facts() | {
            "no hashes without prefix caching": self.enable_prefix_caching or not self._hash_of,
            "hits are at most queries": self.num_hit_tokens <= self.num_query_tokens,
        }
