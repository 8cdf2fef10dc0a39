"""/: a chat with the model in the browser. Static files of one folder, and nothing from elsewhere:
the policy lets the page load from this server alone, run no code but its files, and turn no text
into HTML."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
FOLDER = "/page/"
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",  # no other page shows this one, and takes its clicks
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",  # kept, and asked for again: a newer server has a newer page
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """A route for every file; the first is the page itself."""
    folder = resources.files("trueline.server") / "page"
    found = (file for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES)
    files = {file.name: file.read_bytes() for file in found}
    index = Route("/", _sender(INDEX, files.pop(INDEX)), methods=["GET"])
    return [
        index,
        *(
            Route(f"{FOLDER}{name}", _sender(name, body), methods=["GET"])
            for name, body in sorted(files.items())
        ),
    ]


def _sender(name: str, body: bytes) -> Callable[[Request], Coroutine[None, None, Response]]:
    headers = _HEADERS | {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return send
