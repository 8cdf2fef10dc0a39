"""The block tables of a sequence: one per group of paged kinds with the same block length and
window. Each group has a pool of its own; a request holds as many tables as there are groups.

A prefix of n tokens can be reused where every group has what a request that starts after n tokens
reads of it: all blocks, or, where the group has a window, those that reach into the last
`window` positions. Blocks behind the window are given back as the request goes on; their places in
the table hold the null block. Where a step does not read what it writes itself, so do, from the
first, places that are behind the window when it ends and that no prefix needs. Prefixes are hashed
every `hash_size` tokens, which divides every group's block length, and a block is registered under
the hash at its end, unless it lies behind the window of every prefix that could be reused.
No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from trueline.cache.blocks import NULL_BLOCK, BlockPool, most_touched

Tables = list[list[int]]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the caches have of a sequence's beginning."""

    num_tokens: int
    tables: Tables
    """Whose blocks are found by hash, or null."""


class BlockGroups:
    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self.pools = tuple(pools)
        self.hash_size = gcd(*(pool.block_size for pool in pools))
        self.lcm_block_size = lcm(*(pool.block_size for pool in pools))
        """Prefixes are reused in multiples of so many tokens: full blocks in every group."""

    @property
    def main(self) -> BlockPool:
        """The first: it counts queries and hits, and has the generation of all."""
        return self.pools[0]

    def empty(self) -> Tables:
        return [[] for _ in self.pools]

    def missing(self, tables: Tables, num_positions: int, resume: int | None = None) -> list[int]:
        """Blocks to add, by group, so that so many positions can be written. The next step begins
        at `resume` or later: at the end, unless some of these positions are drafts."""
        return [
            sum(self._placed(pool, len(table), num_positions, resume))
            for pool, table in zip(self.pools, tables, strict=True)
        ]

    def _placed(
        self, pool: BlockPool, first: int, num_positions: int, resume: int | None
    ) -> list[bool]:
        """Of the blocks from the `first` on up to so many positions, which are not null."""
        added = range(first, -(-num_positions // pool.block_size))
        if not pool.keeps_ends:
            return [True] * len(added)
        read = pool.first_read(num_positions if resume is None else resume) // pool.block_size
        return [
            i >= read or (pool.enable_prefix_caching and self._may_be_read(pool, i)) for i in added
        ]

    def most_held(self, num_positions: int, chunk: int) -> list[int]:
        """Blocks that a sequence of so many positions, computed by chunks, holds at a time."""
        return [
            min(-(-num_positions // pool.block_size), self._most_held(pool, chunk))
            if pool.window is not None
            else -(-num_positions // pool.block_size)
            for pool in self.pools
        ]

    def _most_held(self, pool: BlockPool, chunk: int) -> int:
        """With a window: what is read when a chunk begins, and the chunk or what is kept of it."""
        assert pool.window is not None
        reach = pool.block_size, pool.window, pool.window_step
        most = most_touched(*reach, chunk)
        if not pool.keeps_ends:
            return most
        ends = 2 * most_touched(*reach)
        prefixes = chunk // self.lcm_block_size + 1 if pool.enable_prefix_caching else 0
        each = -(-(pool.window - pool.window_step) // pool.block_size)
        return min(most, ends + prefixes * each)

    def ahead(self, tables: Tables, num_positions: int, chunk: int) -> list[int]:
        """Blocks that a sequence will take beyond those it holds, by group, until so many positions
        are written, by chunks: behind a window they come back."""
        return [
            missing if pool.window is None else min(missing, max(most - _num_held(table), 0))
            for pool, missing, most, table in zip(
                self.pools,
                self._beyond(tables, num_positions),
                self.most_held(num_positions, chunk),
                tables,
                strict=True,
            )
        ]

    def _beyond(self, tables: Tables, num_positions: int) -> list[int]:
        """Blocks of so many positions that the tables do not reach."""
        return [
            max(-(-num_positions // pool.block_size) - len(table), 0)
            for pool, table in zip(self.pools, tables, strict=True)
        ]

    def have(self, counts: Sequence[int], sharing: Tables | None = None) -> bool:
        """Whether so many are free, by group, after the blocks of `sharing` have been shared."""
        found = sharing or self.empty()
        return all(
            count <= pool.num_free - pool.num_idle([b for b in table if b != NULL_BLOCK])
            for pool, count, table in zip(self.pools, counts, found, strict=True)
        )

    def allocate(self, tables: Tables, num_positions: int, resume: int | None = None) -> None:
        """Add what is `missing`; callers ask whether it is there."""
        for pool, table in zip(self.pools, tables, strict=True):
            placed = self._placed(pool, len(table), num_positions, resume)
            blocks = iter(pool.allocate(sum(placed)))
            table += [next(blocks) if here else NULL_BLOCK for here in placed]

    def release(self, tables: Tables) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release([block for block in table if block != NULL_BLOCK])
            table.clear()

    def trim(self, tables: Tables, start: int, num_written: int) -> None:
        """After positions `start` to `num_written` have been written, give back blocks that lie
        wholly behind the window of the next one; what was behind it before is gone. Steps execute
        in order, so a later step may write them at once."""
        for pool, table in zip(self.pools, tables, strict=True):
            if pool.window is None:
                continue
            first = pool.first_read(start) // pool.block_size
            behind = min(pool.first_read(num_written) // pool.block_size, len(table))
            if first < behind:
                pool.release([block for block in table[first:behind] if block != NULL_BLOCK])
                table[first:behind] = [NULL_BLOCK] * (behind - first)

    def lookup(self, hashes: Sequence[bytes], most_tokens: int) -> Prefix:
        """The longest prefix of at most so many tokens. Takes no reference."""
        names = [self._names(pool, hashes) for pool in self.pools]
        found = [
            pool.lookup(each) if pool.window is None else None
            for pool, each in zip(self.pools, names, strict=True)
        ]
        ends = [
            len(blocks) * pool.block_size
            for pool, blocks in zip(self.pools, found, strict=True)
            if blocks is not None
        ]
        most = min([most_tokens, len(hashes) * self.hash_size, *ends])
        size = self.lcm_block_size
        for num_tokens in range(most // size * size, 0, -size):
            tables = [
                _in_window(pool, each, num_tokens)
                if blocks is None
                else blocks[: num_tokens // pool.block_size]
                for pool, each, blocks in zip(self.pools, names, found, strict=True)
            ]
            if None not in tables:
                return Prefix(num_tokens, [table for table in tables if table is not None])
        return Prefix(0, self.empty())

    def share(self, tables: Tables) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.share([block for block in table if block != NULL_BLOCK])

    def register(
        self, tables: Tables, hashes: Sequence[bytes], start: int, num_written: int
    ) -> int:
        """Register the full blocks of tokens `start` to `num_written`, as far as they are hashed;
        returns up to which token this has been done."""
        end = min(num_written, len(hashes) * self.hash_size)
        for pool, table in zip(self.pools, tables, strict=True):
            each = pool.block_size // self.hash_size
            for i in range(start // pool.block_size, end // pool.block_size):
                if table[i] != NULL_BLOCK and self._may_be_read(pool, i):
                    pool.register(table[i], hashes[(i + 1) * each - 1])
        return max(start, end)

    def _may_be_read(self, pool: BlockPool, i: int) -> bool:
        """Whether block i of a sequence reaches into what is read after some prefix: after the
        shortest that has it, or after none."""
        stop, size = (i + 1) * pool.block_size, self.lcm_block_size
        return pool.first_read(-(-stop // size) * size) < stop

    def _names(self, pool: BlockPool, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Of the group's blocks: the hash at the end of each."""
        each = pool.block_size // self.hash_size
        return hashes if each == 1 else hashes[each - 1 :: each]


def _num_held(table: list[int]) -> int:
    return len(table) - table.count(NULL_BLOCK)


def _in_window(pool: BlockPool, names: Sequence[bytes], num_tokens: int) -> list[int] | None:
    """What a sequence of so many tokens still reads; None where some of it is not there."""
    first = min(pool.first_read(num_tokens), num_tokens) // pool.block_size
    wanted = names[first : num_tokens // pool.block_size]
    found = pool.lookup(wanted)
    return [NULL_BLOCK] * first + found if len(found) == len(wanted) else None
