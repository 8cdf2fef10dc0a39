"""Counts the values of a body before it is decoded. Decoding holds the GIL until it is done, and
how long that takes depends on how many values there are, and of which kind, far more than on
bytes. Counting goes a window at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.limits import MAX_DIGITS, MAX_FRACTIONS, MAX_NESTED

SMALL = 1 << 12
"""Bytes that hold too little to count."""
WINDOW = 1 << 18
_LONG_NUMBER = re.compile(rb"[-+.0-9eE]{%d,}" % (MAX_DIGITS + 1))
_FRACTION = re.compile(rb"[0-9](?:\.[0-9]+)?[eE]|[0-9]\.[0-9]")


def check_shape(data: bytes, max_values: int) -> None:
    if len(data) < SMALL:
        return
    values = nested = fractions = 0
    tail = b""
    for part in outside_texts(data):
        opened = part.count(b"[") + part.count(b"{")
        nested += opened
        values += opened + part.count(b",")
        fractions += sum(1 for _ in _FRACTION.finditer(part))
        if found := _LONG_NUMBER.search(tail + part):
            raise bad_request(
                f"the body has a number of {len(found[0])} characters or more; accepted: up to "
                f"{MAX_DIGITS}"
            )
        tail = part[-MAX_DIGITS:]
    for given, most, what in (
        (nested, MAX_NESTED, "lists and objects"),
        (fractions, MAX_FRACTIONS, "numbers with a fraction or an exponent"),
        (values, max_values, "values"),
    ):
        if given > most:
            raise bad_request(f"the body has {given} {what}; accepted: up to {most}")


def outside_texts(data: bytes) -> Iterator[bytes]:
    """What is not in a text, a window at a time; a quotation mark for every text."""
    inside, start = False, 0
    while start < len(data):
        window = data[start : start + WINDOW]
        start += len(window)
        if b"\\" in window:
            if (len(window) - len(window.rstrip(b"\\"))) % 2:  # ends within an escape
                window += data[start : start + 1]
                start += 1
            window = window.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = window.split(b'"')
        yield (b'"' if inside else b"") + b'"'.join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
