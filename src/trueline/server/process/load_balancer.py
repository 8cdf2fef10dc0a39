"""Which replica a request goes to: where its prefix was computed, unless that one has too much to
do. No processes here, and no clock."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

FACTOR, SLACK = 1.25, 4
"""A replica may have FACTOR × the mean number of sequences, and SLACK more, for the sake of a
prefix: so few cost less than computing it again."""
MOST_BLOCKS = 128
"""Of a prompt that are looked at. Prompts that are the same for so long go to one replica."""
MOST_PREFIXES = 1 << 16
"""Remembered; the one not seen for longest is forgotten."""


class LoadBalancer:
    """Remembers which replica was given each prefix, by hashes of the prefix cache's blocks. It is
    not told what the replicas evict: a prefix that is gone is computed again, where it was."""

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._block_size = block_size
        self._replica_of: OrderedDict[bytes, int] = OrderedDict()
        self._num_given = [0] * num_replicas

    def choose(
        self, token_ids: Sequence[int], salt: str | None, loads: Sequence[int | None]
    ) -> int | None:
        """`loads`: unfinished sequences by replica, None for one that takes no requests. None: none
        of them does."""
        open_ones = {i: load for i, load in enumerate(loads) if load is not None}
        if not open_ones:
            return None
        hashes = list(self._hashes(token_ids, salt))
        chosen = self._with_prefix(hashes, open_ones)
        most = FACTOR * sum(open_ones.values()) / len(open_ones) + SLACK
        if chosen is None or open_ones[chosen] >= most:
            # of those with the same load, the one that was given the fewest
            chosen = min(open_ones, key=lambda i: (open_ones[i], self._num_given[i], i))
        self._num_given[chosen] += 1
        self._remember(hashes, chosen)
        return chosen

    def _with_prefix(self, hashes: list[bytes], open_ones: dict[int, int]) -> int | None:
        """The replica with the longest prefix."""
        for value in reversed(hashes):
            replica = self._replica_of.get(value)
            if replica in open_ones:
                return replica
        return None

    def _remember(self, hashes: list[bytes], replica: int) -> None:
        for value in hashes:
            self._replica_of[value] = replica
            self._replica_of.move_to_end(value)
        while len(self._replica_of) > MOST_PREFIXES:
            self._replica_of.popitem(last=False)

    def _hashes(self, token_ids: Sequence[int], salt: str | None) -> Iterator[bytes]:
        """Of the full blocks of a prompt, each with all before it."""
        size = self._block_size
        before = b"" if salt is None else b"salt" + salt.encode()
        for start in range(0, min(len(token_ids), MOST_BLOCKS * size) - size + 1, size):
            block = array("q", token_ids[start : start + size]).tobytes()
            before = blake2b(before + block, digest_size=16).digest()
            yield before
