"""What a benchmark sends, and when: the same for every server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from trueline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    """Every request alike: random tokens, greedy, on past the end token."""

    prompt_len: int
    output_len: int
    vocab_size: int
    seed: int
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        if min(self.prompt_len, self.output_len, self.vocab_size) < 1:
            raise UsageError("--prompt-len, --output-len and --vocab-size take numbers from 1 up")

    def prompt(self, point: str, number: int) -> list[int]:
        """No two are alike in one run: no answer of a prefix cache flatters the next figure."""
        draw = random.Random(f"{self.seed}/{point}/{number}")
        return draw.choices(range(self.vocab_size), k=self.prompt_len)

    def body(self, model: str, point: str, number: int, token_ids: bool) -> bytes:
        fields: dict[str, object] = {
            "model": model,
            "prompt": self.prompt(point, number),
            "max_tokens": self.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields)


@dataclass(frozen=True, slots=True)
class Load:
    """So many requests at once, or so many a second whatever becomes of those before."""

    concurrency: int | None = None
    rate: float | None = None
    num_requests: int | None = None
    duration: float | None = None
    """Seconds in which requests start; those under way then are still counted."""

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"--concurrency {self.concurrency}: accepted: numbers from 1 up")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UsageError(f"--rate {self.rate:g}: accepted: requests a second, above 0")
        if self.num_requests is not None and self.num_requests < 1:
            raise UsageError(f"--num-requests {self.num_requests}: accepted: numbers from 1 up")
        if self.duration is not None and not 0 < self.duration < float("inf"):
            raise UsageError(f"--duration {self.duration:g}: accepted: seconds, above 0")

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} req/s"

    @property
    def limit(self) -> int | None:
        """How many requests; None: as many as start in time."""
        if self.num_requests is not None or self.duration is not None:
            return self.num_requests
        return max(16, 4 * self.concurrency) if self.concurrency else 64

    def arrivals(self, seed: int) -> Iterator[float]:
        """Of an open loop: seconds after the start, a Poisson process."""
        assert self.rate is not None
        draw = random.Random(f"{seed}/{self.rate}")
        now, count = 0.0, 0
        while self.limit is None or count < self.limit:
            now += draw.expovariate(self.rate)
            if self.duration is not None and now >= self.duration:
                return
            yield now
            count += 1
