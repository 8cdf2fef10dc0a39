"""The routes, and the middleware before them: request ids, API keys, limits, logs."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trueline import __version__
from trueline.errors import TruelineError, short
from trueline.server.chat_page import page_routes
from trueline.server.docs_page import POLICY, docs_page
from trueline.server.keys import Keys
from trueline.server.limits import UnreadBody, too_large
from trueline.server.logs import event
from trueline.server.metrics import CONTENT_TYPE
from trueline.server.protocol.bodies import FIELDS
from trueline.server.protocol.errors import ApiError
from trueline.server.protocol.messages_api.bodies import MessagesBody
from trueline.server.protocol.not_offered import REFUSED
from trueline.server.protocol.openapi import OPEN, openapi
from trueline.server.protocol.responses import Health, Version
from trueline.server.protocol.responses_api.bodies import ResponsesBody
from trueline.server.replies import error_response
from trueline.server.routes import (
    chat,
    completions,
    count_tokens,
    detokenize,
    messages,
    models,
    not_offered,
    one_model,
    responses,
    tokenize,
    tokenizer_info,
)
from trueline.server.service import Service

LONGEST_ID = 128
_FIELDS = FIELDS.union(ResponsesBody.__struct_fields__, MessagesBody.__struct_fields__)
_FIELD = re.compile("[a-z_]+")
LEFT = 499
"""The status that is logged where the client disconnected before there was one, as nginx does."""
BUG = ApiError(500, "the server failed on this request; its log says where")


def build_app(service: Service, keys: Keys, logger: logging.Logger) -> ASGIApp:
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        *(Route(path, not_offered, methods=["GET", "POST", "DELETE"]) for path in REFUSED),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", one_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/health", ready, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", document, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]
    page = page_routes() if service.config.page else []
    is_open = OPEN.union(route.path for route in page)
    middleware = [
        Middleware(RequestMiddleware, service=service, keys=keys, logger=logger, is_open=is_open)
    ]
    if service.config.cors_origin:
        # Any header: SDKs send their own (x-stainless-*), and none lets a page do more than its
        # origin may. Cookies are not allowed, so a page needs a key of its own.
        middleware.insert(0, Middleware(
            CORSMiddleware, allow_origins=list(service.config.cors_origin),
            allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        ))  # fmt: skip
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        ApiError: _api_error,
        TruelineError: _our_error,
        HTTPException: _http_error,
        ClientDisconnect: _left,
    }
    app = Starlette(routes=[*routes, *page], middleware=middleware, exception_handlers=handlers)
    app.state.service, app.state.logger, app.state.keys = service, logger, keys
    return app


# -- routes without work ---------------------------------------------------------------


async def live(request: Request) -> Response:
    return _json(Health("live"))


async def ready(request: Request) -> Response:
    health = request.app.state.service.health()
    return _json(health, 200 if health.status == "ready" else 503)


async def version(request: Request) -> Response:
    return _json(Version(__version__))


async def document(request: Request) -> Response:
    state = request.app.state
    return _json(openapi(state.service.limits(), with_keys=bool(state.keys)))


async def docs(request: Request) -> Response:
    state = request.app.state
    text = docs_page(openapi(state.service.limits(), with_keys=bool(state.keys)))
    return Response(text, media_type="text/html", headers={"content-security-policy": POLICY})


async def metrics(request: Request) -> Response:
    text = request.app.state.service.metrics.text()
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# -- errors ----------------------------------------------------------------------------


async def _api_error(request: Request, error: ApiError) -> Response:
    request.scope["log_fields"].update(_for_log(error))
    return error_response(error, request.scope)


def _for_log(error: ApiError) -> dict[str, str | None]:
    """Of a wrong request the kind of error and which of our fields. Messages, and names that the
    client has chosen, may quote the request, and are not logged."""
    if error.status >= 500:
        return {"error": error.message}
    field = _FIELD.match(error.param or "")
    return {"error": error.code or error.type,
            "param": field[0] if field and field[0] in _FIELDS else None}  # fmt: skip


async def _our_error(request: Request, error: TruelineError) -> Response:
    return await _api_error(request, ApiError(400, str(error)))


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = short(request.url.path)
    words = {404: f"there is no route {path}", 405: f"{request.method} is not for {path}"}
    shown = ApiError(error.status_code, words.get(error.status_code, error.detail))
    return error_response(shown, request.scope, error.headers)


async def _left(request: Request, error: ClientDisconnect) -> Response:
    request.scope["log_fields"]["client"] = "gone"
    return Response(status_code=LEFT)


# -- middleware -----------------------------------------------------------------------


class RequestMiddleware:
    """Gives every request its id, checks its API key and its size, and logs its response."""

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        keys: Keys,
        logger: logging.Logger,
        is_open: Collection[str] = OPEN,
    ) -> None:
        """`is_open`: the paths that need no key."""
        self.app, self.service, self.keys, self.logger = app, service, keys, logger
        self.is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = request_id(headers.get(b"x-request-id"))
        log_fields: dict[str, object] = {}
        scope["request_id"], scope["log_fields"] = name, log_fields
        began, status = time.monotonic(), 0

        unread = UnreadBody(receive, headers)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    await unread.discard()
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        try:
            if refusal is not None:
                log_fields.update(_for_log(refusal))
                await error_response(refusal, scope)(scope, unread.receive, sending)
            else:
                await self.app(scope, unread.receive, sending)
        except Exception as error:
            fields = {"request_id": name, "path": short(scope["path"], LONGEST_ID)}
            self.logger.error("failed", exc_info=error, extra={"fields": fields})
            if status:  # the status has been sent: the connection is closed instead
                raise
            await error_response(BUG, scope)(scope, unread.receive, sending)
        finally:
            self._log(scope, status or LEFT, time.monotonic() - began)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        given = headers.get(b"authorization")
        if given is None and b"x-api-key" in headers:  # as Anthropic's clients
            given = b"Bearer " + headers[b"x-api-key"]
        if path not in self.is_open and not self.keys.admit(given):
            return ApiError(401, "no valid API key: give one as 'Authorization: Bearer KEY'",
                            code="invalid_api_key")  # fmt: skip
        length, limit = headers.get(b"content-length", b"0"), self.service.config.max_body_bytes
        if length.isdigit() and int(length) > limit:
            return too_large(limit)
        return None

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = route.path if route is not None else "other"
        self.service.metrics.answered(path, status)
        quiet = scope["path"] in self.is_open
        event(
            self.logger,
            "answered",
            logging.DEBUG if quiet else logging.INFO,
            request_id=scope["request_id"],
            method=scope["method"],
            path=short(scope["path"], LONGEST_ID),
            status=status,
            seconds=seconds,
            **scope["log_fields"],
        )


def request_id(given: bytes | None) -> str:
    """The client's own, where it is fit for a header and a log; otherwise a random one."""
    text = (given or b"").decode("latin-1")
    plain = text.isascii() and text.isprintable() and " " not in text
    return text if plain and 0 < len(text) <= LONGEST_ID else uuid.uuid4().hex
