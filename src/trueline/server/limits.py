"""Bodies of bounded size."""

from __future__ import annotations

from starlette.requests import Request

from trueline.server.protocol.errors import ApiError


def too_large(limit: int) -> ApiError:
    told = f"the request's body is larger than {limit} bytes, which is this server's limit"
    return ApiError(413, told, code="body_too_large")


async def read_body(request: Request, limit: int) -> bytes:
    """Also where nobody says beforehand how long it is."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)
