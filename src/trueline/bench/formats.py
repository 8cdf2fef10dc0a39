"""One model in several weight formats: decode rates in turn, so that whatever else the machine does
falls on all of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trueline.bench.models import find_bench_model
from trueline.bench.workload import Workload, bench_engine, timed
from trueline.llm import LLMEngine
from trueline.spec.fields import read_json
from trueline.tiny.configs import change_config
from trueline.tiny.quantise import published_storage
from trueline.utils.json_types import JSON

PLAIN = ("float32", "bfloat16")
STORED = ("block-fp8", "int4", "fp4")
"""Beside bfloat16, as published: int4 and fp4 are the routed experts alone."""


@dataclass(frozen=True, slots=True)
class FormatFigures:
    format: str
    batch: int
    weight_bytes: int
    """As the plan has them."""
    rates: list[float]
    """Decode tokens/s of each round."""

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    def as_json(self) -> JSON:
        return {
            "format": self.format,
            "batch": self.batch,
            "weight_bytes": self.weight_bytes,
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rates,
        }


def format_engine(model: str, name: str, batch: int) -> LLMEngine:
    """The config's model with weights drawn in a format."""
    directory, _ = find_bench_model(model)
    config = read_json(directory / "config.json" if directory.is_dir() else directory)
    storage = None if name in PLAIN else published_storage(name)
    dtype = name if name in PLAIN else "bfloat16"
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    change_config(config, {}, storage=storage)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        return bench_engine(scratch, dtype=dtype, max_num_seqs=batch)


def measure_formats(
    engines: dict[str, LLMEngine],
    batches: Sequence[int],
    output_len: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[FormatFigures]:
    """Each round has every format once. The first is for warming up, and does not count."""
    found = []
    for batch in batches:
        work = Workload(batch, 32, output_len)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(rounds + 1):
            say(f"{batch} requests, round {turn} of {rounds}")
            for name, engine in engines.items():
                figures = timed(engine, work.prompts(engine.spec.vocab.total), output_len)
                rates[name] += [figures.decode_tokens_per_s] if turn else []
        found += [
            FormatFigures(name, batch, engine.plan.weight_bytes, rates[name])
            for name, engine in engines.items()
        ]
    return found
