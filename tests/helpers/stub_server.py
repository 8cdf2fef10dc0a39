"""A server that says what a test scripts, over real sockets. The model's name is the script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TEXT = "naïve – 日本語 🙂\nend"
FIRST, GAP = 0.05, 0.01
"""Seconds before the first token and between the others, of the model `paced`."""
STATUSES = {401: "wrong key", 404: "no such model", 429: "the queue is full", 503: "draining"}


class Stub:
    def __init__(self) -> None:
        self.models = ["paced"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.arrivals: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.list_models),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
            ]
        )

    async def list_models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def answer(self, request: Request) -> Response:
        self.arrivals.append(time.perf_counter())
        self.keys.append(request.headers.get("authorization"))
        body = await request.json()
        self.bodies.append(body)
        script = body["model"]
        if script == "flaky":
            script = ("429", "paced", "cut")[len(self.bodies) % 3]
        if script.isdigit():
            said = STATUSES[int(script)] + f" (key {request.headers.get('authorization')})"
            headers = {"retry-after": "7"} if script == "429" else {}
            return JSONResponse({"error": {"message": said}}, int(script), headers)
        if script == "strict" and "return_token_ids" in body:
            return JSONResponse({"error": {"message": "return_token_ids: unknown"}}, 400)
        if script == "odd" and "odd" in str(body.get("prompt")):
            await asyncio.sleep(0.6)
            return Response(b'{"choices": "\xff', media_type="application/json")
        if script == "whole" or not body.get("stream"):
            return JSONResponse(self.whole(body))
        return StreamingResponse(self.counted(script, body), media_type="text/event-stream")

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": TEXT}} if "messages" in body else {}
        reason = body["model"].partition("ends:")[2] or "stop"
        choice = {"index": 0, "text": TEXT, "finish_reason": reason, **said}
        return {"id": "x-1", "model": body["model"], "choices": [choice], "usage": usage(3, 9)}

    async def counted(self, script: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            async for piece in getattr(self, f"_{script}")(body):
                yield piece
        finally:
            self.in_flight -= 1

    async def _paced(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """One token a frame, on a schedule of its own: late sleeps do not add up."""
        start = time.perf_counter()
        count = body.get("max_tokens", 5)
        for i in range(count):
            await asyncio.sleep(max(start + FIRST + i * GAP - time.perf_counter(), 0))
            ids = {"token_ids": [i]} if body.get("return_token_ids") else {}
            yield frame(body, f"t{i} ", **ids)
        yield frame(body, "", finish_reason="length")
        yield event({"choices": [], "usage": usage(len(body.get("prompt", "")), count)})
        yield b"data: [DONE]\n\n"

    _strict = _paced

    async def _bursts(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Three tokens a frame, no usage, no [DONE]."""
        for i in range(2):
            await asyncio.sleep(GAP)
            yield frame(body, "abc", token_ids=[i, i, i], finish_reason="stop" if i else None)

    async def _uncounted(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        for word in ("a", "b", "", "c"):
            yield frame(body, word)
        yield b"data: [DONE]\n\n"

    async def _split(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Cut inside characters, line ends and field names; comments and CRLF in between."""
        whole = b": ping\r\n\r\n" + b"".join(frame(body, c) for c in TEXT).replace(b"\n", b"\r\n")
        whole += frame(body, "", finish_reason="stop") + b"data: [DONE]\n\n"
        for i in range(0, len(whole), 7):
            yield whole[i : i + 7]
            await asyncio.sleep(0)

    async def _calls(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Calls two functions, and tells what they found; a third call is none after all."""
        found = [each["content"] for each in body["messages"] if each["role"] == "tool"]
        if found:
            yield frame(body, " and ".join(found), finish_reason="stop")
            return
        for index, name in enumerate(("look", "now", "no")):
            begun = {"id": f"c{index}", "function": {"name": name, "arguments": ""}}
            pieces = [begun, *({"function": {"arguments": each}} for each in ('{"a":', "1}"))]
            for piece in pieces:
                yield frame(body, "", delta={"tool_calls": [{"index": index, **piece}]})
        dropped = {
            "content": "no",
            "malformed_tool_calls": [{"index": 2, "reason": "", "text": ""}],
        }
        yield frame(body, "", delta=dropped, finish_reason="tool_calls")

    async def _broken(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield frame(body, "half")
        yield event({"error": {"message": "the engine died", "code": 500}})
        yield b"data: [DONE]\n\n"

    async def _cut(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield frame(body, "half")
        await asyncio.sleep(GAP)
        raise asyncio.CancelledError  # uvicorn drops the connection, and logs nothing

    async def _silent(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield frame(body, "half")

    async def _together(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """When as many are here as tokens are asked for; only the first, a warm-up, at once."""
        while len(self.bodies) > 1 and self.most_in_flight < body["max_tokens"]:
            await asyncio.sleep(GAP)
        for _ in range(body["max_tokens"]):
            yield frame(body, "x")
        yield frame(body, "", finish_reason="length")

    async def _slow(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.6)
        yield frame(body, "late", finish_reason="stop")


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def frame(body: dict[str, Any], text: str, **more: Any) -> bytes:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    choice = {"index": 0, "finish_reason": None, **said, **more}
    return event({"id": "x-1", "model": body["model"], "choices": [choice]})


S = TypeVar("S", bound=Stub)


@contextmanager
def stub_server(kind: type[S] = Stub) -> Iterator[S]:
    stub = kind()
    config = uvicorn.Config(stub.app, host="127.0.0.1", port=0, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    stub.url = f"http://127.0.0.1:{port}"
    yield stub
    server.should_exit = True
    thread.join(timeout=5)
