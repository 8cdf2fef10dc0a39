"""The grammars of requests: checked once, known by what was asked, in a thread of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from trueline.errors import UsageError
from trueline.grammar.calls.forms import CallsForm, constraint_of
from trueline.grammar.constraint import Constraint
from trueline.server.offload import OffloadThread
from trueline.server.protocol.forms import AskedForm, not_honoured

MOST_KEPT = 256
MOST_BYTES = 16 << 20
"""Of what was asked, of all that are kept."""


class CheckedGrammars:
    def __init__(self) -> None:
        self._thread = OffloadThread()
        self._kept: OrderedDict[bytes, Constraint] = OrderedDict()
        self._num_bytes = 0

    async def constraint(self, form: AskedForm | CallsForm | None) -> Constraint | None:
        """ApiError where the form cannot be honoured."""
        match form:
            case None:
                return None
            case CallsForm():
                return await self._made(form, lambda: constraint_of(form))
            case AskedForm(field, params, names):
                made = await self._made(params, lambda: params.constraint(names))
                return msgspec.structs.replace(made, name=field)

    async def _made(self, asked: msgspec.Struct, make: Callable[[], Constraint]) -> Constraint:
        key = type(asked).__name__.encode() + msgspec.msgpack.encode(asked)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            made = await self._thread.run(make)
        except UsageError as error:
            raise not_honoured(error) from None
        self._keep(key, made)
        return made

    def _keep(self, key: bytes, made: Constraint) -> None:
        if key not in self._kept:
            self._kept[key] = made
            self._num_bytes += _size(key, made)
        while len(self._kept) > MOST_KEPT or self._num_bytes > MOST_BYTES:
            old, dropped = self._kept.popitem(last=False)
            self._num_bytes -= _size(old, dropped)


def _size(key: bytes, made: Constraint) -> int:
    return len(key) + sum(map(len, made.grammars))
