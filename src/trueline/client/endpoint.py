"""A server's address and API key, and single requests to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from trueline.client.sse import DONE, Events
from trueline.client.wire import Chunk, ServerError, read_chunk, status_error
from trueline.errors import UsageError

if TYPE_CHECKING:
    import httpx2

VERSION = re.compile(r"v\d\w*")
LONGEST_TIMEOUT = 10_000_000
"""Seconds; sockets take no infinity, and nothing near it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    base: str
    """Ends with /v1, or what the address names as its version."""
    key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    """Seconds without a byte."""

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return headers

    @property
    def is_local(self) -> bool:
        """Then no proxy is used: to a proxy, localhost is itself."""
        host = urlsplit(self.base).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def models(self) -> list[str]:
        import httpx2

        with self._client() as client, self._hiding_key():
            try:
                response = client.get(self.url("models"))
            except httpx2.HTTPError as error:
                raise transport_error(error, self.base) from error
            _check(response)
            try:
                return [str(each["id"]) for each in response.json()["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ServerError("not understood", f"{self.url('models')}: no list") from error

    def pick_model(self, wanted: str | None) -> str:
        """The one asked for, or the only one there is."""
        if wanted:
            return wanted
        known = self.models()
        if len(known) != 1:
            listed = ", ".join(known) or "none"
            raise UsageError(f"{self.base}: give --model; the server has: {listed}")
        return known[0]

    def ask(self, path: str, body: Mapping[str, object]) -> Iterator[Chunk]:
        """The chunks of a stream, or the one of an answer that comes whole. It is sent when the
        first is asked for."""
        return self._answer(self._client(), self.url(path), msgspec.json.encode(body))

    def _answer(self, client: httpx2.Client, url: str, content: bytes) -> Iterator[Chunk]:
        import httpx2

        with client, self._hiding_key():
            try:
                with client.stream("POST", url, content=content) as response:
                    _check(response)
                    if response.headers.get("content-type", "").startswith("text/event-stream"):
                        yield from _chunks(response)
                    else:
                        yield read_chunk(response.read())
            except httpx2.HTTPError as error:
                raise transport_error(error, self.base) from error

    def _client(self) -> httpx2.Client:
        import httpx2

        timeout = httpx2.Timeout(self.timeout, connect=min(self.timeout, 10.0))
        return httpx2.Client(headers=self.headers, timeout=timeout, trust_env=not self.is_local)

    @contextmanager
    def _hiding_key(self) -> Iterator[None]:
        try:
            yield
        except ServerError as error:
            raise self.without_key(error) from error

    def without_key(self, error: ServerError) -> ServerError:
        """Some servers quote the key they refuse."""
        return ServerError(error.kind, self.hide(str(error)))

    def hide(self, text: str) -> str:
        return text.replace(self.key, "[the key]") if self.key else text


def endpoint(url: str, key: str | None = None, timeout: float = 600.0) -> Endpoint:
    """From what a user types: with or without scheme, /v1, or a slash at the end."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        host = (parts.hostname or "").encode("idna")  # an error of a name that none can be
        known = parts.scheme in ("http", "https") and host and parts.port != 0
    except ValueError:
        known = None
    if not known or parts.query or parts.fragment:
        raise UsageError(f"{url}: not an address; accepted: as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError("no user or password in the address: keys go into the environment")
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise UsageError(f"--timeout {timeout}: accepted: seconds above 0, up to {LONGEST_TIMEOUT}")
    path = parts.path.rstrip("/")
    if not VERSION.fullmatch(path.rpartition("/")[2]):
        path += "/v1"
    return Endpoint(f"{parts.scheme}://{parts.netloc}{path}", key or None, timeout)


def transport_error(error: httpx2.HTTPError, base: str) -> ServerError:
    import httpx2

    said = str(error) or type(error).__name__
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        return ServerError("no connection", f"{base}: no connection ({said})")
    if isinstance(error, httpx2.TimeoutException):
        return ServerError("timeout", f"{base}: no answer in time")
    return ServerError("cut off", f"{base}: the connection broke off ({said})")


def _check(response: httpx2.Response) -> None:
    if response.status_code != 200:
        body = response.read()
        wait = response.headers.get("retry-after")
        raise status_error(response.status_code, response.reason_phrase, body, wait)


def _chunks(response: httpx2.Response) -> Iterator[Chunk]:
    finished = False
    for data in _events(response):
        if data == DONE:
            return
        chunk = read_chunk(data)
        finished |= any(choice.finish_reason for choice in chunk.choices)
        yield chunk
    if not finished:
        raise ServerError("cut off", "the stream ended before the answer did")


def _events(response: httpx2.Response) -> Iterator[bytes]:
    events = Events()
    for data in response.iter_raw():
        yield from events.feed(data)
    yield from events.end()
