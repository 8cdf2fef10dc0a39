"""The grammars of requests: checked once, known by what was asked, in a thread of their own."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from trueline.errors import UsageError
from trueline.grammar.constraint import Constraint
from trueline.server.offload import OffloadThread
from trueline.server.protocol.forms import AskedForm, not_honoured

MOST_KEPT = 256
MOST_BYTES = 16 << 20
"""Of what was asked, of all that are kept."""


class CheckedGrammars:
    def __init__(self) -> None:
        self._thread = OffloadThread()
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0

    async def constraint(self, form: AskedForm | None) -> Constraint | None:
        """ApiError where the form cannot be honoured."""
        if form is None:
            return None
        key = msgspec.msgpack.encode(form.params)
        if key in self._kept:
            self._kept.move_to_end(key)
            return Constraint(name=form.field, grammar=self._kept[key])
        try:
            made = await self._thread.run(form.params.compiled, form.names)
        except UsageError as error:
            raise not_honoured(error) from None
        self._keep(key, made)
        return Constraint(name=form.field, grammar=made)

    def _keep(self, key: bytes, made: str) -> None:
        if key not in self._kept:
            self._kept[key] = made
            self._num_bytes += len(key) + len(made)
        while len(self._kept) > MOST_KEPT or self._num_bytes > MOST_BYTES:
            old, text = self._kept.popitem(last=False)
            self._num_bytes -= len(old) + len(text)
