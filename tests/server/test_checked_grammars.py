"""Checked forms are kept by what was asked: so many, and of so many bytes."""

from __future__ import annotations

import asyncio
from types import MappingProxyType

import pytest

from trueline.grammar.structured import StructuredOutputsParams
from trueline.server import grammars
from trueline.server.grammars import CheckedGrammars
from trueline.server.protocol import ApiError
from trueline.server.protocol.forms import AskedForm


def asked(regex: str, field: str = "structured_outputs") -> AskedForm:
    return AskedForm(field, StructuredOutputsParams(regex=regex), MappingProxyType({}))


def test_both_bounds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill(checked: CheckedGrammars, count: int) -> None:
        for i in range(count):
            await checked.constraint(asked(f"a{{{i + 1}}}"))

    monkeypatch.setattr(grammars, "MOST_KEPT", 5)
    few = CheckedGrammars()
    asyncio.run(fill(few, 20))
    assert len(few._kept) == 5
    sizes = [grammars._size(key, made) for key, made in few._kept.items()]
    assert few._num_bytes == sum(sizes)
    monkeypatch.setattr(grammars, "MOST_BYTES", 3 * max(sizes))
    small = CheckedGrammars()
    asyncio.run(fill(small, 20))
    assert len(small._kept) == 3
    assert small._num_bytes <= 3 * max(sizes)


def test_a_form_has_the_name_it_was_asked_by() -> None:
    """Also where another field has asked for the same before."""

    async def both() -> list[str]:
        checked = CheckedGrammars()
        found = [await checked.constraint(asked("a", name)) for name in ("one", "two")]
        assert len(checked._kept) == 1
        with pytest.raises(ApiError) as caught:
            await checked.constraint(asked("("))
        assert caught.value.param == "structured_outputs.regex"
        return [each.name for each in found if each is not None]

    assert asyncio.run(both()) == ["one", "two"]
