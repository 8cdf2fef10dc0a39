"""API keys, compared in constant time and never printed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from trueline.errors import UsageError


class Keys:
    """Without any key, every request is admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: bytes | None) -> bool:
        """Whether an Authorization header has one of the keys. All are compared, whichever fits."""
        if not self._digests:
            return True
        kind, _, given = (authorization or b"").partition(b" ")
        digest = _digest(given.strip())
        fits = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(fits) and kind.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    """Digests have one length, so a comparison's time does not depend on a key's length."""
    return hashlib.sha256(key).digest()


def read_keys(given: Iterable[str], file: Path | None) -> Keys:
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except OSError as error:
            raise UsageError(f"api_key_file {file}: {error.strerror}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"api_key_file {file}: no key in it; accepted: one per line")
        keys += found
    for key in keys:
        if not key:
            raise UsageError("an API key is empty; accepted: at least one character, or none given")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("an API key has characters that no header carries: accepted: ASCII "
                             "without spaces")  # fmt: skip
    return Keys(keys)
