"""Hashes of full blocks: equal hash, equal tokens from the start of the sequence.

A block's hash covers the hash before it, so it stands for the whole prefix, not only for the
block's own tokens. The only place of the cache and the scheduler that sees token values.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

HASH_BYTES: Final = 16


def prefix_salt(model_fingerprint: str, cache_salt: str | None = None) -> bytes:
    """Where a chain starts. The fingerprint stands for all that decides what a cached token is
    (weights, cache layout, adapters); a request's own `cache_salt` keeps its prefixes to those
    who know it, so that timing tells nobody else what was asked."""
    # repr, because it keeps ("ab", "c") and ("a", "bc"), None and "" apart
    return _digest(repr((model_fingerprint, cache_salt)).encode())


def hash_blocks(
    tokens: Sequence[int], block_size: int, salt: bytes, previous: list[bytes]
) -> list[bytes]:
    """The chain over all full blocks of `tokens`. `previous` is the chain of an earlier, shorter
    call for the same sequence: its blocks are not hashed again."""
    chain = list(previous)
    for start in range(len(chain) * block_size, len(tokens) - block_size + 1, block_size):
        # unsigned: a placeholder such as -1 for a token not yet known must never be hashed
        packed = struct.pack(f"<{block_size}Q", *tokens[start : start + block_size])
        chain.append(_digest((chain[-1] if chain else salt) + packed))
    return chain


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()
