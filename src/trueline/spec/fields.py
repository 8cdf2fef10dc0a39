"""A strict reader of one JSON object: every key is read, listed as harmless, or an error.

Only family readers in `models/` use it, and weight formats (`weights/formats/`) for their part of
`quantization_config`; after them nobody reads config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NoReturn, TypeGuard, TypeVar

from trueline.errors import ConfigError, did_you_mean, nearest
from trueline.spec.source import Fact, Source
from trueline.utils.json_types import JSON

T = TypeVar("T")

MAX_COUNT: Final = 2**31 - 1


class _Required:
    """No default: the key must be there."""


REQUIRED: Final = _Required()


def read_json(file: Path) -> JSON:
    """A JSON object, refusing what JSON parsers usually wave through: NaN, doubled keys."""

    def refuse_constant(name: str) -> NoReturn:
        raise ConfigError(f"{file}: {name} is not JSON; finite numbers are accepted")

    def unique(pairs: list[tuple[str, object]]) -> JSON:
        seen: JSON = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(f"{file}: key '{key}' stands twice; each key may stand once")
            seen[key] = value
        return seen

    try:
        text = file.read_text(encoding="utf-8")
        raw = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: found {_show(raw)}; a JSON object is accepted")
    return raw


def _show(value: object) -> str:
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    def __init__(self, raw: JSON, file: Path, prefix: str = "", accepts: str = "") -> None:
        self.raw = raw
        self.file = file
        self.prefix = prefix
        self._known: set[str] = set()
        self._accepts = accepts

    # -- reading one key ---------------------------------------------------------------

    def integer(
        self,
        key: str,
        *,
        minimum: int = 1,
        maximum: int = MAX_COUNT,
        default: Fact[int] | _Required = REQUIRED,
        aliases: tuple[str, ...] = (),
    ) -> Fact[int]:
        def check(value: object) -> TypeGuard[int]:
            return type(value) is int and minimum <= value <= maximum

        return self._read(key, check, f"an integer from {minimum} to {maximum}", default, aliases)

    def integer_or_null(
        self, key: str, *, minimum: int = 1, default: Fact[int | None] | _Required = REQUIRED
    ) -> Fact[int | None]:
        def check(value: object) -> TypeGuard[int | None]:
            return value is None or (type(value) is int and minimum <= value <= MAX_COUNT)

        return self._read(key, check, f"an integer from {minimum} to {MAX_COUNT}, or null", default)

    def number(
        self,
        key: str,
        *,
        above: float = 0.0,
        minimum: float | None = None,
        maximum: float = 1e12,
        default: Fact[float] | _Required = REQUIRED,
    ) -> Fact[float]:
        """A finite number: > above, or >= minimum where that is given."""
        low = f"from {minimum:g}" if minimum is not None else f"above {above:g}"

        def check(value: object) -> TypeGuard[float]:
            if not is_number(value) or not math.isfinite(value):
                return False
            high_enough = value >= minimum if minimum is not None else value > above
            return high_enough and value <= maximum

        fact = self._read(key, check, f"a number {low} to {maximum:g}", default)
        return fact if fact is default else Fact(float(fact.value), fact.source)

    def boolean(
        self,
        key: str,
        *,
        default: Fact[bool] | _Required = REQUIRED,
        aliases: tuple[str, ...] = (),
    ) -> Fact[bool]:
        return self._read(key, _is_boolean, "true or false", default, aliases)

    def choice(
        self,
        key: str,
        accepted: Iterable[str],
        *,
        default: Fact[str] | _Required = REQUIRED,
        aliases: tuple[str, ...] = (),
    ) -> Fact[str]:
        names = tuple(accepted)

        def check(value: object) -> TypeGuard[str]:
            return isinstance(value, str) and value in names

        return self._read(key, check, " or ".join(f'"{n}"' for n in names), default, aliases, names)

    def name(self, key: str) -> Fact[str]:
        return self._read(key, _is_name, "a name", REQUIRED)

    def list_of(
        self,
        key: str,
        check_item: Callable[[object], TypeGuard[T]],
        accepted: str,
        *,
        length: int | None,
    ) -> Fact[tuple[T, ...]]:
        """A list; `length` is the exact length wanted, None for any."""

        def check(value: object) -> TypeGuard[list[T]]:
            if not isinstance(value, list) or length not in (None, len(value)):
                return False
            return all(map(check_item, value))

        wanted = f"a list of {accepted}" if length is None else f"a list of {length}: {accepted}"
        fact = self._read(key, check, wanted, REQUIRED)
        return Fact(tuple(fact.value), fact.source)

    def section(self, key: str, *, accepts: str = "") -> Fields | None:
        """A nested object as its own strict reader; None where it is absent or null."""
        self._known.add(key)
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "a JSON object or null")
        return Fields(value, self.file, f"{self.prefix}{key}.", accepts)

    # -- keys that decide nothing here -------------------------------------------------

    def must_equal(self, key: str, value: object, why: str) -> None:
        """A key that says again what others decide, or that has one accepted value (or null)."""
        if self.has(key) and not _same(self.raw[key], value):
            self.refuse(key, f"{_show(value)}: {why}")

    def ignore(self, *keys: str) -> None:
        """Keys that another fact makes meaningless (say, expert counts of a dense model)."""
        self._known.update(keys)

    def has(self, key: str) -> bool:
        """Present and not null; marks the key as known."""
        self._known.add(key)
        return self.raw.get(key) is not None

    def finish(self, harmless: Mapping[str, str]) -> None:
        """Stop on keys that nobody read and nobody declared harmless."""
        unread = sorted(self.raw.keys() - self._known - harmless.keys())
        if not unread:
            return
        known = self._known | harmless.keys()
        parts = [
            f"'{self.prefix}{key}' = {_show(self.raw[key])}{did_you_mean(key, known)}"
            for key in unread
        ]
        accepted = self._accepts or "keys that this family reads or that are listed as harmless"
        raise ConfigError(
            f"{self.file}: nobody reads {', and '.join(parts)}. Accepted: {accepted}. "
            "An unread key may change the model: remove it if you are sure that it does not"
        )

    # -- errors ------------------------------------------------------------------------

    def refuse(self, key: str, accepted: str) -> NoReturn:
        raise ConfigError(
            f"{self.file}: '{self.prefix}{key}': found {_show(self.raw.get(key))}; "
            f"accepted: {accepted}"
        )

    def _read(
        self,
        key: str,
        check: Callable[[object], TypeGuard[T]],
        accepted: str,
        default: Fact[T] | _Required,
        aliases: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
    ) -> Fact[T]:
        spellings = (key, *aliases)
        self._known.update(spellings)
        present = [name for name in spellings if name in self.raw]
        if not present:
            if isinstance(default, _Required):
                self._missing(key, accepted)
            return default
        first = present[0]
        for other in present[1:]:
            if not _same(self.raw[other], self.raw[first]):
                self.refuse(other, f"{_show(self.raw[first])}, as '{self.prefix}{first}' says")
        value = self.raw[first]
        if not check(value):
            # A null where the family has a documented value reads as an absent key.
            if value is None and not isinstance(default, _Required):
                return default
            hint = did_you_mean(value, names) if isinstance(value, str) else ""
            self.refuse(first, accepted + hint)
        return Fact(value, Source("key", self.prefix + first))

    def _missing(self, key: str, accepted: str) -> NoReturn:
        close = nearest(key, self.raw.keys() - self._known)
        hint = f"; the nearest key in the file is '{self.prefix}{close}'" if close else ""
        raise ConfigError(
            f"{self.file}: '{self.prefix}{key}' is missing and a formula needs it; "
            f"found nothing, accepted: {accepted}{hint}"
        )


def is_number(value: object) -> TypeGuard[int | float]:
    """Of JSON: true is not 1."""
    return type(value) in (int, float)


def _is_boolean(value: object) -> TypeGuard[bool]:
    return type(value) is bool


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def _same(a: object, b: object) -> bool:
    """Equal as JSON values: true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
