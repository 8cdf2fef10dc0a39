"""One answer, gathered as it comes, with its times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trueline.client.wire import Chunk, ResponseChoice, TokenUsage


@dataclass(slots=True)
class ReceivedCall:
    id: str = ""
    name: str = ""
    arguments: str = ""

    def as_message(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class StreamedResponse:
    start: float = 0.0
    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: dict[int, ReceivedCall] = field(default_factory=dict)
    chunks_with_text: int = 0
    listed_tokens: int = 0
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    model: str | None = None
    id: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def num_tokens(self) -> int:
        """The server's count where it gives one; until then chunks stand for tokens."""
        if self.usage:
            return self.usage.completion_tokens
        return self.listed_tokens or self.chunks_with_text

    @property
    def counted_by(self) -> str:
        return "usage" if self.usage else "token_ids" if self.listed_tokens else "frames"

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; unknown of a single one, or of an answer that came whole."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.num_tokens - 1) / (self.last - self.first)

    def update(self, chunk: Chunk) -> None:
        self.id, self.model = chunk.id or self.id, chunk.model or self.model
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.listed_tokens += len(choice.token_ids or ())
            self._call(choice)
            if choice.answer or choice.thought or choice.token_ids or choice.calls:
                self.last = time.perf_counter()
                self.first = self.first or self.last
                self.chunks_with_text += 1
                self.pieces.append(choice.answer)
                self.thoughts.append(choice.thought)

    @property
    def call_messages(self) -> list[dict[str, object]]:
        """As a message has them."""
        return [call.as_message() for call in self.calls.values()]

    def _call(self, choice: ResponseChoice) -> None:
        for piece in choice.calls:
            place = len(self.calls) if piece.index is None else piece.index
            call = self.calls.setdefault(place, ReceivedCall())
            call.id += piece.id or ""
            call.name += piece.function.name or ""
            call.arguments += piece.function.arguments or ""
        for place in choice.malformed:
            self.calls.pop(place, None)

    def account(self) -> str:
        """One line for the end."""
        if self.first is None:
            return f"no text ({self.finish_reason or 'no reason given'})"
        parts = [f"first token after {self.first - self.start:.3f} s"]
        if (rate := self.tokens_per_s) is not None:
            parts.append(f"then {rate:.1f} tokens/s")
        if self.usage is None:
            parts.append(f"about {self.num_tokens} tokens (the server did not count)")
        else:
            cached = self.usage.cached_tokens
            note = f" ({cached} of them cached)" if cached else ""
            parts.append(f"{self.usage.prompt_tokens}{note} + {self.num_tokens} tokens")
        parts.append(f"ended by {self.finish_reason or 'no reason given'}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, object]:
        usage = self.usage
        return {
            "id": self.id,
            "model": self.model,
            "text": self.text,
            "reasoning": "".join(self.thoughts) or None,
            **({"tool_calls": self.call_messages} if self.calls else {}),
            "finish_reason": self.finish_reason,
            "usage": usage
            and {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "tokens": self.num_tokens,
            "tokens_counted_by": self.counted_by,
            "first_token_s": self.first and self.first - self.start,
            "total_s": self.last and self.last - self.start,
            "tokens_per_s": self.tokens_per_s,
        }


def gather(
    chunks: Iterable[Chunk],
    answer: StreamedResponse,
    show: Callable[[StreamedResponse, Chunk], None] | None = None,
) -> StreamedResponse:
    """Into `answer`, which keeps what came even where this is interrupted."""
    answer.start = time.perf_counter()
    for chunk in chunks:
        answer.update(chunk)
        if show:
            show(answer, chunk)
    return answer
