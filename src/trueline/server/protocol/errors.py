"""Errors as a client gets them: OpenAI's JSON shape, and the HTTP status."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from trueline.errors import TruelineError, short

LONGEST_MESSAGE = 1000
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    """The field that is wrong, as messages[0].content."""
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(TruelineError):
    """`retry_after` seconds go into the header of that name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        # they may quote what a client has sent, and that may be long
        self.message = short(message, LONGEST_MESSAGE)
        super().__init__(self.message)
        self.status, self.code = status, code
        self.param = None if param is None else short(param)
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after

    def body(self) -> bytes:
        detail = ErrorDetail(self.message, self.type, self.param, self.code)
        return msgspec.json.encode(ErrorResponse(detail))

    def event(self) -> bytes:
        """As a server-sent event, for a stream whose status has been sent."""
        return b"data: " + self.body() + b"\n\n"


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within call fields as `names` do: of an endpoint that has others than chats."""
    try:
        yield
    except ApiError as error:
        raise _renamed(error, names) from None


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    found = _NAMED.match(error.message)
    if found is None or found[1] not in names:
        return error
    name = names[found[1]]
    param = name + (error.param or "").removeprefix(found[1])
    return ApiError(
        error.status,
        name + error.message[found.end() :],
        # a place in messages is one in messages that the client has not seen
        param=name if found[2] else param,
        code=error.code,
        retry_after=error.retry_after,
    )


_NAMED = re.compile(r"([a-z_]+)((?:\[\d+\][\w.]*)*)(?=:| = )")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


_FIRST_NAME = re.compile(r"([a-z_]+)((?:\[\d+\]|\.\w+)*)(?: = |: | is | has )")


def from_usage(error: TruelineError, fields: Collection[str]) -> ApiError:
    """Our own errors begin with the name of what is wrong: it is the param where it is one of the
    request's fields."""
    found = _FIRST_NAME.match(str(error))
    param = found[1] + found[2] if found and found[1] in fields else None
    return bad_request(str(error), param)
