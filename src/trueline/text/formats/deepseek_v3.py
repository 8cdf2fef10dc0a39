"""DeepSeek-V3, R1 and V3.1: markers that are tokens, arguments as JSON. V3 and R1 have it in a
fence, behind the name; in V3.1 the name stands before the separator."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.text.formats.calls import Broken, CallReader
from trueline.text.formats.reader import Reading

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "```json", "```"


@dataclass(frozen=True)
class DeepSeekV3Calls:
    name: str
    fenced: bool
    spellings = (CALLS, END_CALLS, CALL, SEPARATOR, END_CALL)
    opens = (CALLS, CALL)
    call_id = None

    def read(self, calls: CallReader, opened: str) -> Reading[None]:
        return calls.section(opened, CALL, END_CALLS, lambda: self._call(calls), END_CALL)

    def _call(self, calls: CallReader) -> Reading[None]:
        ends = (END_CALL, CALL, END_CALLS)
        head, stop = yield from calls.name("a name", calls.literals(SEPARATOR, *ends))
        if stop != calls.markers.seen(SEPARATOR):
            raise Broken("no separator behind the name", stop)
        end = calls.literals(END_CALL)
        if not self.fenced:
            calls.start(head.strip())
            yield from calls.object(end)
            return
        name, stop = yield from calls.name("a name", calls.literals("\n", *ends))
        if stop != "\n":
            raise Broken("no arguments behind the name", stop)
        calls.start(name.strip())
        yield from calls.expect(calls.literals(FENCE), f"no {FENCE} before the arguments")
        yield from calls.object(calls.literals(END_FENCE), end)
