"""JSONL files, a line an item. A bad line is an error that names file, line and key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import msgspec

from trueline.errors import UsageError, did_you_mean, short_repr
from trueline.utils.json_types import JSON, JsonValue


@dataclass(frozen=True, slots=True)
class Line:
    file: Path
    number: int
    fields: JSON

    def key(self, *names: str) -> str:
        """The first of these keys that the line has."""
        for name in names:
            if name in self.fields:
                return name
        wanted = " or ".join(f"'{name}'" for name in names)
        hint = did_you_mean(names[0], self.fields)
        has = ", ".join(self.fields) or "none"
        raise UsageError(f"{self.where}: no key {wanted}; it has: {has}{hint}")

    def text(self, *names: str) -> str:
        key = self.key(*names)
        value = self.fields[key]
        if not isinstance(value, str) or not value.strip():
            raise self.refusal(key, "a text that is not empty")
        return value

    def scalar(self, *names: str) -> str:
        """A text, or a number as one."""
        key = self.key(*names)
        value = self.fields[key]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.refusal(key, "a text that is not empty, or a number")
        # 1e-07 in full: people and models write 0.0000001
        text = format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)
        if not text.strip():
            raise self.refusal(key, "a text that is not empty, or a number")
        return text

    def refusal(self, key: str, accepted: str) -> UsageError:
        found: JsonValue = self.fields[key]
        return UsageError(
            f"{self.where}: key '{key}': found {short_repr(found)}; accepted: {accepted}"
        )

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.number}"


def read_lines(file: Path) -> list[Line]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: not readable ({error})") from error
    found = list(_lines(file, content.removeprefix(b"\xef\xbb\xbf")))
    if not found:
        raise UsageError(f"{file}: no items; accepted: JSONL, one object a line")
    return found


def _lines(file: Path, content: bytes) -> Iterator[Line]:
    # not splitlines(): JSON may hold U+2028 as it is
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            fields = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(fields, dict):
            found = short_repr(fields)
            raise UsageError(f"{file}, line {number}: found {found}; accepted: a JSON object")
        yield Line(file, number, fields)
