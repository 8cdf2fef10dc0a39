"""One model in several weight formats: decode rates in turn, so that whatever else the machine does
falls on all of them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trueline.bench.models import find_bench_model
from trueline.bench.workload import Workload, bench_engine, timed
from trueline.llm import LLMEngine
from trueline.models import read_model
from trueline.ops.linear import native as linear
from trueline.plan.plan import DTYPES
from trueline.spec.fields import read_json
from trueline.spec.model import ModelSpec
from trueline.tiny.configs import change_config
from trueline.tiny.quantise import published_storage
from trueline.utils.json_types import JSON
from trueline.weights.dummy import draw_stored
from trueline.weights.formats import Storage
from trueline.weights.value import StoredPart, Weight

PLAIN = ("float32", "bfloat16")
STORED = ("block-fp8", "block-fp8-ue8m0", "int4", "fp4")
"""Beside bfloat16, as published: int4 and fp4 are the routed experts alone, and beside fp4 stands
block fp8."""
PUBLISHED = {"v2lite": "block-fp8", "v32s": "block-fp8-ue8m0", "k25s": "int4", "v4s": "fp4"}
"""The format that checkpoints of such widths are published in: the scales of DeepSeek's block fp8
are powers of two since V3.1."""
UE8M0 = "-ue8m0"
MATRIX = (16384, 8192)
"""Of the GEMM: in four bits it is still larger than the caches of most CPUs."""


@dataclass(frozen=True, slots=True)
class GemmFigures:
    format: str
    rows: int
    weight_bytes: int
    """As packed."""
    seconds: list[float]
    cpu_seconds: list[float]
    """Of all cores: what other programs use is not in it."""

    def as_json(self) -> JSON:
        return asdict(self)


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


def measure_gemm(names: Sequence[str], row_counts: Sequence[int], rounds: int) -> list[GemmFigures]:
    """One large matrix times a few rows, by our own kernel, every format in turn."""
    packed = {name: linear.pack(_draw_matrix(name)) for name in names}
    found = []
    for rows in row_counts:
        x = torch.randn(rows, MATRIX[1])
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name in names:
                start, cpu_start = time.perf_counter(), time.process_time()
                linear.run(x, packed[name])
                taken = time.perf_counter() - start, time.process_time() - cpu_start
                times[name] += [taken] if turn else []
        for name in names:
            seconds, cpu_seconds = (list(each) for each in zip(*times[name], strict=True))
            size = packed[name].data.nbytes
            found.append(GemmFigures(name, rows, size, seconds, cpu_seconds))
    return found


def _draw_matrix(name: str) -> Weight:
    generator = torch.Generator().manual_seed(0)
    if name in PLAIN:
        return Weight.of(torch.randn(MATRIX, generator=generator).to(DTYPES[name]))
    fmt = storage_of(name).formats[0]
    stored = draw_stored(fmt, MATRIX, torch.bfloat16, generator)
    return Weight(MATRIX, torch.bfloat16, (StoredPart(stored, fmt.label, (0, 0)),))


def storage_of(name: str) -> Storage:
    """One of STORED."""
    return published_storage(name.removesuffix(UE8M0), power_of_two_scales=name.endswith(UE8M0))


def format_config(model: str, name: str) -> JSON:
    """A config's own, with the quantization_config of a format."""
    directory, _ = find_bench_model(model)
    config = read_json(directory / "config.json" if directory.is_dir() else directory)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    change_config(config, {}, storage=None if name in PLAIN else storage_of(name))
    return config


def format_engine(model: str, name: str, **options: Any) -> LLMEngine:
    """The config's model with weights drawn in a format."""
    dtype = name if name in PLAIN else "bfloat16"
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(format_config(model, name)))
        return bench_engine(scratch, dtype=dtype, **options)


def format_spec(model: str, name: str) -> ModelSpec:
    """The spec of the same model."""
    directory, _ = find_bench_model(model)
    spec = read_model(directory)
    return replace(spec, storage=None if name in PLAIN else storage_of(name))


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
