"""The part of OpenAI's protocol that clients read: completions and chat, whole and streamed, in one
shape."""

from __future__ import annotations

import msgspec

from trueline.errors import TruelineError
from trueline.utils.json_types import JsonValue


class ServerError(TruelineError):
    """A server that refused, failed or went away; in its own words where it has some."""

    exit_code = 1

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """For counting: few words, the same for the same cause."""


class CallWords(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct):
    """A call of a function, or the next piece of one."""

    index: int | None = None
    """In a stream: of which."""
    id: str | None = None
    function: CallWords = CallWords()


class MalformedCall(msgspec.Struct):
    """Ours alone: a call that is text after all."""

    index: int | None = None


class Words(msgspec.Struct):
    """A chat's message, or the next piece of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None
    malformed_tool_calls: list[MalformedCall] | None = None


class ResponseChoice(msgspec.Struct):
    text: str | None = None
    delta: Words | None = None
    message: Words | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def answer(self) -> str:
        words = self.delta or self.message
        return self.text or (words and words.content) or ""

    @property
    def thought(self) -> str:
        words = self.delta or self.message
        return (words and (words.reasoning_content or words.reasoning)) or ""

    @property
    def calls(self) -> list[CallPiece]:
        words = self.delta or self.message
        return (words and words.tool_calls) or []

    @property
    def malformed(self) -> list[int]:
        """Calls of a stream that are none."""
        found = (self.delta and self.delta.malformed_tool_calls) or []
        return [each.index for each in found if each.index is not None]


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class Chunk(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    object: str | None = None
    choices: list[ResponseChoice] = []
    usage: TokenUsage | None = None
    error: JsonValue = None
    message: JsonValue = None


_decode = msgspec.json.Decoder(Chunk).decode


def read_chunk(data: bytes) -> Chunk:
    """Raises what the server said where it reports an error in the middle of a stream."""
    try:
        chunk = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        start = data[:200].decode(errors="replace")
        raise ServerError("not understood", f"an answer that is none ({error}): {start}") from error
    if chunk.error is not None or chunk.object == "error":
        said = said_in(data) or "no reason given"
        raise ServerError("error in the stream", f"the server broke off: {said}")
    return chunk


def said_in(body: bytes) -> str | None:
    """The message of an error, in any of the shapes that servers use."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:500].decode(errors="replace").strip() or None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()[:500]


def status_error(status: int, reason: str, body: bytes, retry_after: str | None) -> ServerError:
    said = said_in(body)
    words = f"{status} {reason}".strip() + (f": {said}" if said else "")
    words += f" (retry after {retry_after} s)" if retry_after else ""
    return ServerError(f"HTTP {status}", words)
