"""HTTP as bytes on a socket, for what no well-behaved client sends, or how it leaves."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 20.0


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """Of OpenAI's shape, or a KeyError."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Wire:
    """One connection."""

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), seconds)
        self.rest = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def line(self) -> bytes:
        """Up to and without its end; b"" at the end of all, too."""
        while b"\r\n" not in self.rest:
            if not self._more():
                return b""
        line, _, self.rest = self.rest.partition(b"\r\n")
        return line

    def answer(self, *, head_only: bool = False) -> HttpResponse:
        start = self.line()
        assert start.startswith(b"HTTP/1.1 "), start
        headers = {}
        while line := self.line().decode("latin-1"):
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if head_only:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join(self._chunks())
        else:
            body = self._exactly(int(headers["content-length"]))
        return HttpResponse(int(start.split()[1]), headers, body)

    def ended(self) -> bool:
        """Whether the server has closed it, with nothing left to say."""
        return not self.rest and not self._more()

    def close(self) -> None:
        self.socket.close()

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self.rest += data
        return bool(data)

    def _exactly(self, count: int) -> bytes:
        while len(self.rest) < count:
            assert self._more(), "the connection ended within a body"
        data, self.rest = self.rest[:count], self.rest[count:]
        return data

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.line(), 16):
            yield self._exactly(size)
            self.line()
        self.line()


@contextmanager
def wire(url: str) -> Iterator[Wire]:
    connection = Wire(url)
    try:
        yield connection
    finally:
        connection.close()


def request(
    method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: here"]
    if body is not None:
        lines += [f"content-length: {len(body)}", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


def events(body: bytes) -> list[Any]:
    """Of an SSE answer; [DONE] as None."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == "", "the last frame is cut off"
    assert all(frame.startswith("data: ") for frame in frames)
    texts = [frame.removeprefix("data: ") for frame in frames]
    return [None if text == "[DONE]" else json.loads(text) for text in texts]
