"""Workloads and how they are timed: fixed prompts of random tokens, greedy, no end token."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trueline.engine.params import SamplingParams
from trueline.llm import LLMEngine


@dataclass(frozen=True, slots=True)
class Workload:
    batch: int
    prompt_len: int
    output_len: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The same for every engine that is measured."""
        draw = random.Random(f"{self.batch}/{self.prompt_len}")
        return [
            [draw.randrange(vocab_size) for _ in range(self.prompt_len)] for _ in range(self.batch)
        ]


@dataclass(frozen=True, slots=True)
class Figures:
    batch: int
    prompt_len: int
    output_len: int
    first_token_s: float
    """Until every request has its first token."""
    total_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        return self.batch * (self.output_len - 1) / max(self.total_s - self.first_token_s, 1e-9)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.batch * self.prompt_len / self.first_token_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }


STANDARD = {
    "decode b1": Workload(1, 128, 64),
    "decode b8": Workload(8, 128, 64),
    "decode b32": Workload(32, 128, 64),
    "prefill 2048": Workload(1, 2048, 1),
}
"""The CPU table of docs/performance.md."""


def measure(engine: LLMEngine, work: Workload, repeats: int = 1) -> Figures:
    """The best of `repeats` runs, after one short one to warm up."""
    _timed(engine, Workload(work.batch, min(work.prompt_len, 16), 2))
    runs = [_timed(engine, work) for _ in range(repeats)]
    return min(runs, key=lambda figures: figures.total_s)


def _timed(engine: LLMEngine, work: Workload) -> Figures:
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(work.prompts(engine.spec.vocab.total)):
        engine.add_request(f"bench-{i}", {"prompt_token_ids": prompt}, params)
    first: dict[str, float] = {}
    for now, request_id in _tokens(engine):
        first.setdefault(request_id, now - start)
    total = time.perf_counter() - start
    return Figures(work.batch, work.prompt_len, work.output_len, max(first.values()), total)


def _tokens(engine: LLMEngine) -> Iterator[tuple[float, str]]:
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids:
                yield time.perf_counter(), output.request_id
