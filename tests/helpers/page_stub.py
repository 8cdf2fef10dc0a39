"""A scripted server with the chat page before it: what the model says, a test writes down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stub_server import Stub, event, usage
from trueline.server.chat_page import page_routes


class PageStub(Stub):
    def __init__(self) -> None:
        super().__init__()
        self.models = ["scripted"]
        self.api_key: str | None = None
        self.health: dict[str, str] = {"status": "ready"}
        self.document: dict[str, Any] = {}
        self.answers: list[list[dict[str, Any]]] = []
        """Of each request in turn the deltas; those of the last are said again and again."""
        self.finish_reason = "stop"
        self.refusal: tuple[int, dict[str, Any]] | None = None
        """Status and error of every request for an answer."""
        self.holding = True
        """The delta {} waits while it is so."""
        self.num_cut = 0
        """Answers that the client did not wait for."""
        self.app.router.routes[:0] = [
            *page_routes(),
            Route("/health", self.tell_health),
            Route("/metrics", self.tell_metrics),
            Route("/openapi.json", self.tell_document),
        ]

    async def tell_health(self, request: Request) -> Response:
        return JSONResponse(self.health, 200 if self.health["status"] == "ready" else 503)

    async def tell_metrics(self, request: Request) -> Response:
        return Response(f"trueline:num_requests_running {self.in_flight}\n")

    async def tell_document(self, request: Request) -> Response:
        return JSONResponse(self.document)

    async def list_models(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        cards = [{"id": name, "max_model_len": 4096} for name in self.models]
        return JSONResponse({"object": "list", "data": cards})

    async def answer(self, request: Request) -> Response:
        if self.refusal is not None:
            status, error = self.refusal
            return JSONResponse({"error": error}, status)
        return self._refusal(request) or await super().answer(request)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.get("authorization")
        if self.api_key is None or given == f"Bearer {self.api_key}":
            return None
        return JSONResponse({"error": {"message": "no valid API key"}}, 401)

    def say(self, *texts: str) -> None:
        """What every answer from now on says, a delta a text."""
        self.answers = [[{"content": text} for text in texts]]

    async def _scripted(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        deltas = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for count, delta in enumerate(deltas, 1):
            if not delta:
                await self._held()
            said = {name: value for name, value in delta.items() if name != "logprobs"}
            choice = {"index": 0, "delta": said, "logprobs": delta.get("logprobs")}
            yield event({"choices": [choice], "usage": usage(7, count)})
            await asyncio.sleep(0)
        ending = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        yield event({"choices": [ending], "usage": usage(7, len(deltas))})
        yield b"data: [DONE]\n\n"

    async def _held(self) -> None:
        try:
            while self.holding:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cut += 1
            raise
