"""Endpoints that clients of OpenAI's and Anthropic's ask for, and that are not here."""

from __future__ import annotations

import re

from trueline.server.protocol.errors import ApiError

_KEPT = "nothing is kept between requests"
REFUSED: dict[str, str] = {
    "/v1/embeddings": "the models here generate text, and make no embeddings",
    "/v1/rerank": "the models here generate text, and rank none",
    "/v1/score": "the models here generate text; scores of a prompt's tokens: /v1/completions with "
    "echo, logprobs and max_tokens = 0",
    "/v1/moderations": "the models here generate text, and moderate none",
    "/v1/audio/{rest:path}": "the models here take text alone, and give text alone",
    "/v1/images/{rest:path}": "the models here take text alone, and give text alone",
    "/v1/videos": "the models here take text alone, and give text alone",
    "/v1/realtime/{rest:path}": "the models here take text alone; answers come as they are made "
    "where stream is true",
    "/v1/files": f"{_KEPT}; what is to be read goes into the messages",
    "/v1/files/{rest:path}": f"{_KEPT}; what is to be read goes into the messages",
    "/v1/uploads": f"{_KEPT}; what is to be read goes into the messages",
    "/v1/vector_stores": f"{_KEPT}; what is to be read goes into the messages",
    "/v1/batches": f"{_KEPT}; send the requests, as many at once as you like",
    "/v1/messages/batches": f"{_KEPT}; send the requests, as many at once as you like",
    "/v1/batches/{rest:path}": f"{_KEPT}; send the requests, as many at once as you like",
    "/v1/messages/batches/{rest:path}": f"{_KEPT}; send the requests, as many at once as you like",
    "/v1/responses/{rest:path}": f"{_KEPT}; POST /v1/responses gives the response itself",
    "/v1/conversations": f"{_KEPT}; input has the items of turns before",
    "/v1/conversations/{rest:path}": f"{_KEPT}; input has the items of turns before",
    "/v1/assistants": f"{_KEPT}; instructions and tools go into each request",
    "/v1/threads": f"{_KEPT}; input has the items of turns before",
    "/v1/threads/{rest:path}": f"{_KEPT}; input has the items of turns before",
    "/v1/fine_tuning/{rest:path}": "models are served here, and not trained",
}
"""Why, by route."""
_PATTERNS = {re.compile(re.sub(r"\{.*\}", ".*", route)): why for route, why in REFUSED.items()}


def refused(method: str, path: str) -> ApiError:
    why = next(why for route, why in _PATTERNS.items() if route.fullmatch(path))
    return ApiError(404, f"{method} {path} is not offered: {why}", code="not_offered")
