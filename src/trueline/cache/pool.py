"""Who holds which place of a cache, and what a place nobody holds still remembers. A place is a
block of the paged cache (blocks.py) or a slot of the state cache (slots.py): one life for both.

A place is in exactly one of three states:

    blank    nobody holds it and its contents are worth nothing
    cached   nobody holds it, but its contents are known by a hash: a later request may share it
    held     one or more requests hold it; with a hash, more may join

    allocate: blank, else the oldest cached -> held      share: cached or held -> held
    release of the last reference: held -> cached with a hash, else -> blank
    forget: cached -> blank; held stays held, without its hash

What has a hash is never written again, so sharing needs no copy. Counts, ids and hashes only: no
tensors, no token values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Final

NULL: Final = 0
"""The place that padded rows point at and may write at any time, so nobody ever owns it."""


class PoolError(RuntimeError):
    """A pool was misused or is inconsistent: a bug of the engine, never the user's fault."""


class Pool:
    """Places 1 to `size` - 1, and the null place."""

    noun: ClassVar[str]

    def __init__(self, size: int) -> None:
        if size < 2:
            raise PoolError(
                f"num_{self.noun}s={size}: a pool takes at least 2 {self.noun}s, one of them the "
                f"null {self.noun}"
            )
        self.num_evictions = 0
        """Contents lost because their place, or what they depend on, was needed for others."""
        self.dependent: Pool | None = None
        """Its contents are worth nothing without those of the same hash here: they go together."""
        self._references = [0] * size
        self._blank = list(range(size - 1, NULL, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._place_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def ids(self) -> range:
        """Places that requests can hold."""
        return range(NULL + 1, len(self._references))

    @property
    def num_usable(self) -> int:
        """Places that requests can hold at all."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """Places that could be allocated now: blank, or cached and held by nobody."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Places that nobody holds and whose contents are known."""
        return len(self._cached)

    def references(self, place: int) -> int:
        return self._references[place]

    def hash_of(self, place: int) -> bytes | None:
        return self._hash_of.get(place)

    def find(self, value: bytes) -> int | None:
        """Where contents with this hash are. Takes no reference."""
        return self._place_of.get(value)

    def allocate(self, count: int) -> list[int]:
        """Places for one new holder, contents undefined. Callers ask `num_free` first."""
        if not 0 <= count <= self.num_free:
            raise PoolError(f"allocate({count}): {self.num_free} {self.noun}s are free")
        places = [self._take() for _ in range(count)]
        for place in places:
            self._references[place] = 1
        return places

    def _take(self) -> int:
        if not self._blank:
            self.evict(self._hash_of[next(iter(self._cached))])
        return self._blank.pop()

    def share(self, places: Sequence[int]) -> None:
        """One more holder for places that were found by hash."""
        for place in places:
            if place not in self._hash_of:
                raise PoolError(f"share: {self.noun} {place} has no registered contents")
            if self._references[place] == 0:
                del self._cached[place]
            self._references[place] += 1

    def release(self, places: Sequence[int]) -> None:
        """One holder less. `places` in the order of the sequence: its tail is released first, hence
        evicted first, because a prefix without its head can no longer be found."""
        for place in reversed(places):
            if self._references[place] < 1:
                raise PoolError(f"release: nobody holds {self.noun} {place}")
            self._references[place] -= 1
            if self._references[place]:
                continue
            if place in self._hash_of:
                self._cached[place] = None
            else:
                self._blank.append(place)

    def register(self, place: int, value: bytes) -> None:
        """A held place is written for good, and its contents have this hash. Where two places have
        the same contents the first stays findable and the second stays private."""
        if self._references[place] < 1:
            raise PoolError(f"register: nobody holds {self.noun} {place}")
        known = self._hash_of.get(place)
        if known is not None and known != value:
            raise PoolError(f"register: {self.noun} {place} already has other contents")
        if value not in self._place_of:
            self._place_of[value] = place
            self._hash_of[place] = value

    def forget(self, value: bytes) -> None:
        """Contents with this hash, if there are any, are not to be found again, neither here nor in
        the dependent."""
        place = self._place_of.pop(value, None)
        if place is None:
            return
        del self._hash_of[place]
        if self._references[place] == 0:
            del self._cached[place]
            self._blank.append(place)
        if self.dependent is not None:
            self.dependent.evict(value)

    def evict(self, value: bytes) -> None:
        """Forget what was worth keeping."""
        self.num_evictions += value in self._place_of
        self.forget(value)

    def forget_all(self) -> None:
        """As `forget` for every hash. Holders keep their places."""
        self._blank.extend(self._cached)
        self._cached.clear()
        self._place_of.clear()
        self._hash_of.clear()
        if self.dependent is not None:
            self.dependent.forget_all()

    def check(self) -> None:
        """Every invariant, in O(size); for tests and debugging."""
        broken = [fact for fact, holds in self._facts().items() if not holds]
        if broken:
            raise PoolError(f"{self.noun} pool: not true any more: {'; '.join(broken)}")

    def _facts(self) -> dict[str, bool]:
        blank, cached = set(self._blank), set(self._cached)
        held = {i for i, count in enumerate(self._references) if count > 0}
        owned = range(NULL + 1, len(self._references))
        return {
            "no count is negative": min(self._references) >= 0,
            "nothing is blank twice": len(blank) == len(self._blank),
            "all but the null one are in one state": (
                sorted([*blank, *cached, *held]) == list(owned)
            ),
            "what is blank has no hash": not blank & self._hash_of.keys(),
            "what is cached has one": cached <= self._hash_of.keys(),
            "hashes and places match": (
                {value: i for i, value in self._hash_of.items()} == self._place_of
                and len(self._hash_of) == len(self._place_of)
            ),
            "the dependent knows nothing more": (
                self.dependent is None or self.dependent._place_of.keys() <= self._place_of.keys()
            ),
        }
