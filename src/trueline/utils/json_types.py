"""Decoded JSON as types. Its values are what a file or a client holds: who reads one checks it."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonValue: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Any]
