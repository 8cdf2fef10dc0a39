"""Decoded JSON as types. Its values are what a file or a client holds: who reads one checks it."""

from __future__ import annotations

from typing import Any, TypeAlias

JSON: TypeAlias = dict[str, Any]
"""An object, as config files, bodies and reports are."""
JsonValue: TypeAlias = Any
