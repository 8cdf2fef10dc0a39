"""DeepSeek-V3.2 and V4: calls in DSML, a parameter at a time. `string="true"` says that a value is
a text; anything else is JSON. The models also write all arguments as one JSON object."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.text.formats.calls import Broken, CallReader, Parameters
from trueline.text.formats.reader import ENDED, Reading
from trueline.text.formats.values import NO_TEXT, TEXT

DSML = "｜DSML｜"
INVOKE, END_INVOKE = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, END_PARAMETER = f'<{DSML}parameter name="', f"</{DSML}parameter>"
KINDS = {'" string="true">': TEXT, '" string="false">': NO_TEXT}


@dataclass(frozen=True)
class DsmlCalls:
    name: str
    block: str
    """The name of the element around all calls."""
    spellings = (DSML,)
    call_id = None

    @property
    def opens(self) -> tuple[str, ...]:
        return (f"<{DSML}{self.block}>", INVOKE)

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        end = f"</{DSML}{self.block}>"
        return calls.section(opened, INVOKE, end, lambda: self._call(calls, end), END_INVOKE)

    def _call(self, calls: CallReader, end: str) -> Reading[None]:
        close = calls.markers.seen(END_INVOKE)
        ends = (END_INVOKE, INVOKE, end)
        name, stop = yield from calls.name("a name", calls.literals('">', '"/>', *ends))
        if stop not in ('">', '"/>'):
            raise Broken("no end of the name", stop)
        calls.start(name)
        parameters = Parameters(calls)
        if stop == '">':
            yield from calls.reader.space()
            if calls.reader.text.startswith("{"):
                yield from calls.object(calls.literals(END_INVOKE))
                return
            marks = calls.literals(PARAMETER, END_INVOKE)
            while (yield from calls.expect(marks, "neither a parameter nor an end")) != close:
                yield from self._parameter(calls, parameters, name, ends)
        parameters.end()

    def _parameter(
        self, calls: CallReader, parameters: Parameters, function: str, ends: tuple[str, ...]
    ) -> Reading[None]:
        closes = calls.literals(*KINDS, '">', *ends)
        name, kind = yield from calls.name("a parameter's name", closes)
        if kind in calls.literals(*ends).texts:
            raise Broken("no end of a parameter's name", kind)
        parameters.begin(name)
        types = KINDS[kind] if kind in KINDS else calls.functions.types(function, name)
        stops = calls.literals(END_PARAMETER, *ends)
        stop = yield from calls.parameter(types, stops)
        if stop != stops.texts[0]:
            raise Broken(f"no end of parameter {name!r}" if stop else ENDED, stop)
