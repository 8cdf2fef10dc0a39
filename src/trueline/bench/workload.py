"""Workloads and how they are timed: fixed prompts of random tokens, greedy, no end token."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trueline.bench.models import find_bench_model
from trueline.engine.params import SamplingParams
from trueline.errors import EngineBroken
from trueline.llm import LLMEngine
from trueline.outputs import RequestOutput
from trueline.utils.gc_frozen import gc_frozen
from trueline.utils.json_types import JSON


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

    def as_json(self) -> JSON:
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
"""The CPU table of docs/results/performance.md."""


def measure(engine: LLMEngine, work: Workload, repeats: int = 1) -> Figures:
    """The best of `repeats` runs, after one short one to warm up."""
    vocab_size = engine.spec.vocab.total
    timed(engine, Workload(work.batch, min(work.prompt_len, 16), 2).prompts(vocab_size), 2)
    prompts = work.prompts(vocab_size)
    runs = [timed(engine, prompts, work.output_len) for _ in range(repeats)]
    return min(runs, key=lambda figures: figures.total_s)


def timed(engine: LLMEngine, prompts: list[list[int]], output_len: int) -> Figures:
    """One run of prompts of one length, all at once."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"bench-{i}", {"prompt_token_ids": prompt}, params)
    first: dict[str, float] = {}
    with gc_frozen():
        for now, request_id in _tokens(engine):
            first.setdefault(request_id, now - start)
    total = time.perf_counter() - start
    return Figures(len(prompts), len(prompts[0]), output_len, max(first.values()), total)


def _tokens(engine: LLMEngine) -> Iterator[tuple[float, str]]:
    while engine.has_unfinished_requests():
        for output in stepped(engine):
            if output.outputs[0].token_ids:
                yield time.perf_counter(), output.request_id


def stepped(engine: LLMEngine) -> list[RequestOutput]:
    """One step; there are no figures of one that fails."""
    outputs = engine.step()
    for copy in (copy for output in outputs for copy in output.outputs):
        if copy.error:
            raise EngineBroken(copy.error)
    return outputs


def bench_engine(model: str, *, caching: bool = False, **options: Any) -> LLMEngine:
    """Weights that are not there are drawn."""
    path, has_weights = find_bench_model(model)
    if not has_weights:
        options["load_format"] = "dummy"
    return LLMEngine(path, skip_tokenizer_init=True, enable_prefix_caching=caching, **options)


def main(model: str, works: str, started: str, mode: str) -> None:
    """What `trueline bench compare` runs in a process of its own, started at time `started`: what
    it takes until the first token counts too."""
    engine = bench_engine(model, batch_invariant=mode == "invariant")
    measure(engine, Workload(1, 16, 1))
    ready = time.time() - float(started)
    results = []
    for batch, prompt_len, output_len in json.loads(works):
        results.append(measure(engine, Workload(batch, prompt_len, output_len)).as_json())
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"ready_s": ready, "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:5])
