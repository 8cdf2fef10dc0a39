"""Kimi-K2 to K2.7: a call's own id says which function it is of, arguments are JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trueline.text.formats.calls import Broken, CallReader
from trueline.text.formats.reader import Reading

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
PREFIX = "functions."
_ID = re.compile(r"(?P<name>.+):[0-9]+")


@dataclass(frozen=True)
class KimiK2Calls:
    name: str = "kimi_k2"
    spellings = (SECTION, END_SECTION, CALL, END_CALL, ARGUMENTS)
    opens = (SECTION, CALL)
    call_id = PREFIX + "{name}:{number}"

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        return calls.section(opened, CALL, END_SECTION, lambda: self._call(calls), END_CALL)

    def _call(self, calls: CallReader) -> Reading[None]:
        marks = calls.literals(ARGUMENTS, END_CALL, CALL, END_SECTION)
        head, stop = yield from calls.name("a call's id", marks)
        if stop != calls.markers.seen(ARGUMENTS):
            raise Broken("no arguments behind the id", stop)
        call_id = head.strip()
        if call_id.isdecimal():  # some outputs count calls and leave the name out
            offered = calls.functions.names
            if len(offered) != 1:
                raise Broken(f"id '{call_id}' names none of {len(offered)} functions")
            calls.start(offered[0], call_id)
        else:
            found = _ID.fullmatch(call_id)
            name = found["name"] if found else call_id
            calls.start(name.removeprefix(PREFIX), call_id if found else None)
        yield from calls.object(calls.literals(END_CALL))
