"""Server-sent events that have names."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


def named_event(event: msgspec.Struct) -> bytes:
    """By its tag."""
    name = str(event.__struct_config__.tag).encode()
    return b"event: " + name + b"\ndata: " + _encode(event) + b"\n\n"
