"""Server-sent events as they come off the wire, cut anywhere."""

from __future__ import annotations

DONE = b"[DONE]"
"""What OpenAI's protocol sends last."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Events:
    """Feed it bytes; it gives the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        text = self._rest + received
        held = b""
        if b"\r" in text:  # JSON escapes it, so here it only ends lines
            if text.endswith(b"\r"):  # its \n may be on the way
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = text.split(b"\n\n")
        self._rest = events.pop() + held
        return [data for event in events if (data := _data(event)) is not None]

    def end(self) -> list[bytes]:
        """The stream is over: an event that lacks only its blank line counts."""
        return self.feed(b"\n\n")


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = []
    for line in event.removeprefix(BYTE_ORDER_MARK).split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines) if lines else None
