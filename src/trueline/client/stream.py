"""HTTP/1.1 as load needs it: many connections in one loop, bytes handed over as they arrive.

httpx2 spends 55 to 120 µs of CPU on every chunk of a stream, this about 30 (a third of it in the
kernel): at thousands of chunks a second it is a core that the server under test needs. And the time
of a chunk is that of the socket's read.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

from trueline.client.endpoint import Endpoint
from trueline.client.wire import ServerError

CONNECT_SECONDS = 10.0


class Sink(Protocol):
    """Who reads an answer."""

    def head(self, status: int, reason: str, headers: dict[bytes, bytes]) -> None: ...
    def data(self, chunk: bytes) -> None: ...


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._read = self._read_head
        self._left = 0
        self.answered = False
        """Whether any byte of the present answer has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by descent

    def send(self, request: bytes, sink: Sink) -> asyncio.Future[None]:
        assert self._transport is not None
        self._sink, self._read, self.answered = sink, self._read_head, False
        self._done = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail("cut off", "the connection was closed")
        else:
            self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # nobody asked: do not trust what follows
            self.close()
            return
        self.answered = True
        self._rest = self._rest + data if self._rest else data
        try:
            while self._rest and not self._done.done() and self._read():
                pass
        except ValueError as error:
            self._fail("not understood", f"not HTTP: {error}")
        except ServerError as error:
            self._fail(error.kind, str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if self._read == self._read_to_end and error is None:
            self._done.set_result(None)
        else:
            self._fail("cut off", "the connection broke off" + (f" ({error})" if error else ""))

    def _fail(self, kind: str, message: str) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(ServerError(kind, message))

    # Each reads what it can of `_rest`, and says whether to go on.

    def _read_head(self) -> bool:
        head, end, rest = self._rest.partition(b"\r\n\r\n")
        if not end:
            return False
        self._rest = rest
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        number, _, reason = status.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(first[:80].decode(errors="replace"))
        if int(number) < 200:  # 100 Continue and the like
            return True
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        closing = headers.get(b"connection", b"").lower() == b"close"
        self.reusable = not closing and version != b"HTTP/1.0"
        assert self._sink is not None
        self._sink.head(int(number), reason.decode(errors="replace"), headers)
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._read = self._read_chunks
        elif (length := headers.get(b"content-length")) is not None:
            self._left, self._read = int(length), self._read_length
            return self._read_length()  # it may be 0
        else:
            self.reusable, self._read = False, self._read_to_end
        return True

    def _read_chunks(self) -> bool:
        """All that are whole; what is cut waits."""
        rest, at, got = self._rest, 0, []
        while (end := rest.find(b"\r\n", at)) >= 0:
            size = int(rest[at:end].split(b";")[0], 16)
            if size == 0:
                self._read = self._read_trailer
                break
            stop = end + 2 + size
            if len(rest) < stop + 2:
                break
            if rest[stop : stop + 2] != b"\r\n":
                raise ValueError("a chunk longer than it says")
            got.append(rest[end + 2 : stop])
            at = stop + 2
        self._rest = rest[at:]
        if got:
            assert self._sink is not None
            self._sink.data(got[0] if len(got) == 1 else b"".join(got))
        return self._read == self._read_trailer

    def _read_trailer(self) -> bool:
        """From the size of the last chunk, 0, to the blank line."""
        _, end, rest = self._rest.partition(b"\r\n\r\n")
        if end:
            self._rest = rest
            self._finish()
        return False

    def _read_length(self) -> bool:
        part, self._rest = self._rest[: self._left], self._rest[self._left :]
        self._left -= len(part)
        assert self._sink is not None
        if part:
            self._sink.data(part)
        if self._left == 0:
            self._finish()
        return False

    def _read_to_end(self) -> bool:
        part, self._rest = self._rest, b""
        assert self._sink is not None
        self._sink.data(part)
        return False

    def _finish(self) -> None:
        assert self._done is not None
        if self._rest:
            self.reusable, self._rest = False, b""
        self._done.set_result(None)


class ConnectionPool:
    """As many connections as there are requests under way; idle ones are used again."""

    def __init__(self, server: Endpoint) -> None:
        parts = urlsplit(server.base)
        secure = parts.scheme == "https"
        self._server = server
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self._idle: list[Connection] = []
        self.opened = 0
        shown = [f"{name}: {value}\r\n" for name, value in server.headers.items()]
        self._head = f" HTTP/1.1\r\nhost: {parts.netloc}\r\n{''.join(shown)}".encode()

    def request(self, path: str, body: bytes) -> bytes:
        target = urlsplit(self._server.url(path)).path
        length = f"content-length: {len(body)}\r\n\r\n"
        return b"".join((b"POST ", target.encode(), self._head, length.encode(), body))

    async def ask(self, request: bytes, sink: Sink) -> None:
        """Until the answer is over. Idle connections may have been closed by the server: a request
        that one of them swallowed without a byte of answer goes out again on a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                try:
                    return await self._exchange(connection, request, sink)
                except ServerError as error:
                    if error.kind != "cut off" or connection.answered:
                        raise
        return await self._exchange(await self._connect(), request, sink)

    async def _exchange(self, connection: Connection, request: bytes, sink: Sink) -> None:
        try:
            await connection.send(request, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        self.opened += 1
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ServerError("no connection", f"{self._server.base}: no connection") from None
        except OSError as error:
            raise ServerError("no connection", f"{self._server.base}: {error}") from error
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
