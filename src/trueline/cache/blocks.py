"""Who holds which block of the paged cache, and what a block nobody holds still remembers.

A block is in exactly one of three places:

    blank    nobody holds it and its contents are worth nothing
    cached   nobody holds it, but its contents are known by a hash: a later request may share it
    held     one or more requests hold it; with a hash, more may join

    allocate: blank, else the oldest cached -> held      share: cached or held -> held
    release of the last reference: held -> cached with a hash, else -> blank

Only full blocks get a hash, and a full block is never written again, so sharing needs no copy.
Counts, ids and hashes only: no tensors, no token values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

NULL_BLOCK: Final = 0
"""Padded rows point at it and may write it at any time, so nobody ever owns it."""


class BlockError(RuntimeError):
    """The pool was misused or is inconsistent: a bug of the engine, never the user's fault."""


class BlockPool:
    """`num_blocks` blocks of `block_size` positions, the null block included."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if num_blocks < 2 or block_size < 1:
            raise BlockError(
                f"num_blocks={num_blocks}, block_size={block_size}: a pool takes at least 2 blocks "
                "(one is the null block) of at least 1 position"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.generation = 0
        """Grows with every reset; what was computed under an older one must not be registered."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now: blank, or cached and held by nobody."""
        return len(self._blank) + len(self._cached)

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash_of.get(block_id)

    def num_idle(self, ids: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them lowers `num_free` by as many."""
        return sum(self._references[block_id] == 0 for block_id in ids)

    def allocate(self, count: int) -> list[int]:
        """Blocks for one new holder, contents undefined. Callers ask `num_free` first."""
        if not 0 <= count <= self.num_free:
            raise BlockError(f"allocate({count}): {self.num_free} blocks are free")
        ids = [self._take() for _ in range(count)]
        for block_id in ids:
            self._references[block_id] = 1
        return ids

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block_id)]
        self.num_evictions += 1
        return block_id

    def share(self, ids: Sequence[int]) -> None:
        """One more holder for blocks that `lookup` found."""
        for block_id in ids:
            if block_id not in self._hash_of:
                raise BlockError(f"share: block {block_id} has no registered contents")
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """One holder less. `ids` in the order of the sequence: its tail is released first, hence
        evicted first, because a prefix without its head can no longer be found."""
        for block_id in reversed(ids):
            if self._references[block_id] < 1:
                raise BlockError(f"release: nobody holds block {block_id}")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if block_id in self._hash_of:
                self._cached[block_id] = None
            else:
                self._blank.append(block_id)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest cached prefix of a hash chain. Takes no reference and counts nothing: a
        request may ask many times before it is admitted."""
        found: list[int] = []
        for value in hashes:
            block_id = self._block_of.get(value)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Account for an admission that read the prefix cache."""
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    def register(self, block_id: int, value: bytes) -> None:
        """A held block is full, written, and its contents have this hash. Where two blocks have
        the same contents the first stays findable and the second stays private."""
        if self._references[block_id] < 1:
            raise BlockError(f"register: nobody holds block {block_id}")
        known = self._hash_of.get(block_id)
        if known is not None and known != value:
            raise BlockError(f"register: block {block_id} already has other contents")
        if self.enable_prefix_caching and value not in self._block_of:
            self._block_of[value] = block_id
            self._hash_of[block_id] = value

    def reset_prefix_cache(self) -> None:
        """Forget all contents, as after a change of weights. Holders keep their blocks, but what
        they computed belongs to the old `generation` and must not be registered again."""
        self.generation += 1
        self._blank.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._hash_of.clear()

    def check(self) -> None:
        """Every invariant, in O(num_blocks); for tests and debugging."""
        blank, cached = set(self._blank), set(self._cached)
        held = {i for i, count in enumerate(self._references) if count > 0}
        owned = range(NULL_BLOCK + 1, self.num_blocks)
        facts = {
            "no count is negative": min(self._references) >= 0,
            "no block is blank twice": len(blank) == len(self._blank),
            "every block but the null block is in one place": (
                sorted([*blank, *cached, *held]) == list(owned)
            ),
            "blank blocks have no hash": not blank & self._hash_of.keys(),
            "cached blocks have one": cached <= self._hash_of.keys(),
            "hashes and blocks match": (
                {value: i for i, value in self._hash_of.items()} == self._block_of
                and len(self._hash_of) == len(self._block_of)
            ),
            "no hashes without prefix caching": self.enable_prefix_caching or not self._hash_of,
            "hits are at most queries": self.num_hit_tokens <= self.num_query_tokens,
        }
        broken = [fact for fact, holds in facts.items() if not holds]
        if broken:
            raise BlockError(f"block pool: not true any more: {'; '.join(broken)}")
