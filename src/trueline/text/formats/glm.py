"""GLM-4.5 to GLM-5, and Ring-2.6: a parameter at a time; which values are texts, the function's
schema says. GLM-4.5 puts a line's end behind the name, later ones do not."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.text.formats.calls import Broken, CallReader, Parameters
from trueline.text.formats.reader import ENDED, Reading

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


@dataclass(frozen=True)
class GlmCalls:
    name: str
    line_ends: bool
    """As written by the model: read are both."""
    spellings = (CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
    opens = (CALL,)
    call_id = None

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        found: str | None = opened
        while found == opened:
            ends = calls.literals(END_CALL, CALL)
            found = yield from calls.call(opened, lambda: self._call(calls), ends)

    def _call(self, calls: CallReader) -> Reading[None]:
        close = calls.markers.seen(END_CALL)
        name, stop = yield from calls.name("a name", calls.literals(KEY, END_CALL, CALL))
        if stop == calls.markers.seen(CALL):
            raise Broken("no end of the call", stop)
        calls.start(name.strip())
        parameters = Parameters(calls)
        while stop != close:
            yield from self._parameter(calls, parameters, name.strip())
            marks = calls.literals(KEY, END_CALL)
            stop = yield from calls.expect(marks, "neither a parameter nor an end")
        parameters.end()

    def _parameter(self, calls: CallReader, parameters: Parameters, function: str) -> Reading[None]:
        marks = calls.literals(END_KEY, END_CALL, CALL)
        key, stop = yield from calls.name("a parameter's name", marks)
        if stop != marks.texts[0]:
            raise Broken("no end of a parameter's name", stop)
        yield from calls.expect(calls.literals(VALUE), "no value behind a parameter's name")
        parameters.begin(key.strip())
        marks = calls.literals(END_VALUE, END_CALL, CALL)
        types = calls.functions.types(function, key.strip())
        stop_value = yield from calls.parameter(types, marks)
        if stop_value != marks.texts[0]:
            raise Broken(f"no end of parameter {key!r}" if stop_value else ENDED, stop_value)
