"""Many clients of a server in one event loop, of all manners, who know what they should hear."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from wire import events, request

SECONDS = 60.0
"""For one answer: more than all who wait before it need together."""


@dataclass(frozen=True)
class Question:
    asked: dict[str, Any]
    texts: list[str]
    """The right answer, by choice."""
    ends: list[str]
    tokens: int

    def check_whole(self, body: bytes) -> None:
        found = json.loads(body)
        texts = {each["index"]: each["text"] for each in found["choices"]}
        ends = {each["index"]: each["finish_reason"] for each in found["choices"]}
        self._check(texts, ends, found["usage"])

    def check_stream(self, body: bytes) -> None:
        *frames, done = events(body)
        assert done is None, f"a stream without its end: {frames[-1] if frames else body!r}"
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        for choice in (choice for frame in frames for choice in frame["choices"]):
            index = choice["index"]
            assert index not in ends, "news of a choice that has ended"
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
        self._check(texts, ends, frames[-1]["usage"])

    def _check(self, texts: dict[int, str], ends: dict[int, str], usage: dict[str, Any]) -> None:
        places = range(len(self.texts))
        found = [texts.get(i) for i in places], [ends.get(i) for i in places]
        assert found == (self.texts, self.ends), f"{self.asked}: {found}, not {self.texts}"
        assert usage["completion_tokens"] == self.tokens, f"{self.asked}: {usage}"


@dataclass
class LoadClients:
    url: str
    questions: list[Question]
    limit: int
    """Of the server, in bytes of a body."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    async def visit(self, clients: int, seconds: float, manners: dict[str, int]) -> None:
        """So many at once for so long, each with one request after the other."""
        end = time.monotonic() + seconds
        ways: dict[str, Callable[..., Coroutine[Any, Any, str]]] = {
            name: getattr(self, f"_{name}") for name in manners
        }

        async def live(number: int) -> None:
            rng = random.Random(number)
            await asyncio.sleep(rng.random())
            while time.monotonic() < end:
                (name,) = rng.choices(list(manners), list(manners.values()))
                try:
                    async with asyncio.timeout(SECONDS):
                        outcome = await ways[name](rng)
                except Exception as error:
                    outcome = "lost or wrong"
                    self.failures.append(f"{name}: {type(error).__name__}: {error}"[:600])
                self.outcomes[f"{name}: {outcome}"] += 1
                if outcome == "429":
                    await asyncio.sleep(rng.random())

        await asyncio.gather(*(live(number) for number in range(clients)))

    # -- manners: each gives the outcome, or raises -----------------------------------------

    async def _stream(self, rng: random.Random) -> str:
        return await self._asks(rng, stream=True, pause=0.0)

    async def _slow(self, rng: random.Random) -> str:
        return await self._asks(rng, stream=True, pause=0.05)

    async def _whole(self, rng: random.Random) -> str:
        return await self._asks(rng, stream=False, pause=0.0)

    async def _leaves(self, rng: random.Random) -> str:
        """After some of the answer, or before any of it."""
        asked = rng.choice(self.questions).asked
        reader, writer = await self._connect()
        writer.write(_posted({**asked, "stream": rng.random() < 0.7}))
        if rng.random() < 0.8:
            await reader.read(rng.choice([1, 500, 3000]))
        writer.transport.abort()
        return "left"

    async def _half(self, rng: random.Random) -> str:
        """Leaves while asking."""
        sent = _posted(rng.choice(self.questions).asked)
        _, writer = await self._connect()
        writer.write(sent[: rng.randrange(len(sent))])
        await asyncio.sleep(rng.random() / 10)
        writer.transport.abort()
        return "left"

    async def _large(self, rng: random.Random) -> str:
        """Over the limit, and says so or does not."""
        if rng.random() < 0.5:
            head = request(
                "POST", "/v1/completions", None, _CLOSE | {"transfer-encoding": "chunked"}
            )
            piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
            sent = head + piece * (self.limit // 0x8000 + 1)
        else:
            sent = request("POST", "/v1/completions", b" " * (self.limit + 1), _CLOSE)
        return self._refused(await self._exchange(sent), 413, "body_too_large")

    async def _broken(self, rng: random.Random) -> str:
        whole = json.dumps(rng.choice(self.questions).asked).encode()
        cut = whole[: rng.randrange(len(whole))]
        sent = request("POST", "/v1/completions", cut, _CLOSE)
        return self._refused(await self._exchange(sent), 400, None)

    async def _megabyte(self, rng: random.Random) -> str:
        """Within the limit, and far too long for the model."""
        prompt: Any = "true to the line " * 60_000 if rng.random() < 0.5 else [7, 31, 5] * 100_000
        sent = _posted({"prompt": prompt, "max_tokens": 1})
        status = self._refused(await self._exchange(sent), 400, "context_length_exceeded")
        await asyncio.sleep(0.5)
        return status

    # -- exchanges --------------------------------------------------------------------------

    async def _asks(self, rng: random.Random, stream: bool, pause: float) -> str:
        question = rng.choice(self.questions)
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        head, body = await self._exchange(_posted({**question.asked, **more}), pause)
        if not head.startswith(b"HTTP/1.1 200 "):
            return self._refused((head, body), 429, "queue_full")
        (question.check_stream if stream else question.check_whole)(body)
        return "right"

    def _refused(self, answer: tuple[bytes, bytes], status: int, code: str | None) -> str:
        """With this status, or because there is no room, which is said before a body is read."""
        head, body = answer
        if head.startswith(b"HTTP/1.1 429 "):
            status, code = 429, "queue_full"
        assert head.startswith(b"HTTP/1.1 %d " % status), (head, body)
        assert json.loads(body)["error"]["code"] == code
        return str(status)

    async def _connect(self, buffer: int | None = None) -> Any:
        parts = urlsplit(self.url)
        connection = socket.socket()
        connection.setblocking(False)
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        address = (parts.hostname, parts.port)
        await asyncio.get_running_loop().sock_connect(connection, address)
        return await asyncio.open_connection(sock=connection, limit=buffer or 1 << 16)

    async def _exchange(self, sent: bytes, pause: float = 0.0) -> tuple[bytes, bytes]:
        """Head and body of the answer. With a pause, it is read as by a slow client."""
        reader, writer = await self._connect(4096 if pause else None)
        try:
            writer.write(sent)
            pieces = []
            while piece := await reader.read(2048 if pause else 1 << 16):
                pieces.append(piece)
                await asyncio.sleep(pause)
        finally:
            writer.transport.abort()
        head, _, body = b"".join(pieces).partition(b"\r\n\r\n")
        chunked = b"transfer-encoding: chunked" in head
        return head, _joined(body) if chunked else body


_CLOSE = {"connection": "close"}


def _posted(asked: dict[str, Any]) -> bytes:
    return request("POST", "/v1/completions", json.dumps(asked).encode(), _CLOSE)


def _joined(body: bytes) -> bytes:
    """Of chunks, of which none may be missing."""
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return b"".join(parts)
        assert len(body) >= count + 2, "cut off within a chunk"
        parts.append(body[:count])
        body = body[count + 2 :]
