"""Long lists as raw JSON. Encoding holds the GIL until it is done, so it goes by pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

PIECE = 256
_encode = msgspec.json.Encoder().encode


def in_pieces(values: Sequence[Any] | None) -> Any:
    """What is encoded as `values` are."""
    if values is None or len(values) <= PIECE:
        return values
    pieces = (_encode(values[i : i + PIECE])[1:-1] for i in range(0, len(values), PIECE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
