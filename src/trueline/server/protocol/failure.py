"""How sequences that did not come to their end are told to a client."""

from __future__ import annotations

from collections.abc import Sequence

from trueline.outputs import RequestOutput
from trueline.server.protocol.errors import ApiError, bad_request


def failure(outputs: Sequence[RequestOutput]) -> ApiError | None:
    """The error of sequences that did not come to their end."""
    for completion in (completion for output in outputs for completion in output.outputs):
        if completion.finish_reason == "abort":
            return ApiError(503, completion.error or "the request was aborted", code="aborted")
        if completion.client_error:
            return bad_request(completion.error or "the request cannot be met")
        if completion.finish_reason == "error":
            return ApiError(500, completion.error or "the engine failed", code="engine_error")
    return None
