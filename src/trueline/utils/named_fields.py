"""Structs whose callers are users: an unknown or unnamed argument is an error that helps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from trueline.errors import UsageError, did_you_mean


class NamesUnknownFields(type(msgspec.Struct)):  # type: ignore[misc]
    """msgspec's own error for an unknown argument is a bare TypeError."""

    NOUN: ClassVar[str]
    """What a field is called."""
    NOT_OFFERED: ClassVar[Mapping[str, str]]
    """Fields that other engines have, and what to do instead."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        known = cls.__struct_fields__
        for name in kwargs:
            if name not in known:
                instead = cls.NOT_OFFERED.get(name)
                hint = f"; {instead}" if instead else did_you_mean(name, known)
                raise UsageError(f"{cls.NOUN} '{name}' is not known{hint}")
        if args:
            raise UsageError(f"{cls.NOUN}s are given by name, as {known[0]}=...")
        return super().__call__(**kwargs)
