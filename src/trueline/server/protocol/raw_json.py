"""Long lists as raw JSON. Encoding holds the GIL until it is done, so it goes by pieces."""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

PIECE = 256
_encode = msgspec.json.Encoder().encode
T = TypeVar("T")


def in_pieces(values: list[T]) -> list[T]:
    """What is encoded as `values` are: raw JSON in place of a long list."""
    if len(values) <= PIECE:
        return values
    pieces = (_encode(values[i : i + PIECE])[1:-1] for i in range(0, len(values), PIECE))
    return cast("list[T]", msgspec.Raw(b"[" + b",".join(pieces) + b"]"))
