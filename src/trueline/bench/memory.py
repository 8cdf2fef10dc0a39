"""Host memory while the files of a model in a stored format are loaded: a checkpoint of published
widths, cut to a few layers, is written and then loaded by a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.footprint import tensor_bytes
from trueline.bench.formats import format_config
from trueline.device import find_device, peak_resident_bytes, resident_bytes
from trueline.engine.executor import local_runner
from trueline.errors import UsageError
from trueline.llm import LLMEngine
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.tiny.make import DTYPES, PRECISE_KINDS, write_shards
from trueline.tiny.quantise import file_tensors
from trueline.utils.json_types import JSON
from trueline.weights.dummy import draw_parameter, draw_stored
from trueline.weights.formats import format_of, weight_bytes

MOST_DISK = 20e9
SPARE_DISK = 2e9
SHARD_BYTES = 2 << 30
SLACK = 1 << 30
"""Beside the largest file: what loading may take beyond the weights."""
CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    model: str
    format: str
    layers: int
    device: str
    checkpoint_bytes: int
    """Of all files."""
    largest_file: int
    loaded_bytes: int
    """Of the model's tensors, once it is loaded."""
    peak_bytes: int
    """By which the process grew at most."""
    seconds: float

    @property
    def limit(self) -> int:
        """A GPU holds the weights itself."""
        on_host = self.loaded_bytes if self.device == "cpu" else 0
        return on_host + self.largest_file + SLACK

    @property
    def met(self) -> bool:
        return self.peak_bytes <= self.limit

    def as_json(self) -> JSON:
        return asdict(self) | {"limit": self.limit, "met": self.met}


def measure_load(
    model: str, name: str, layers: int, directory: Path | None, say: Callable[[str], None]
) -> LoadFigures:
    """`directory`: where the checkpoint is written and deleted; None: where temporary files are."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        at = Path(scratch)
        config = format_config(model, name) | {"num_hidden_layers": layers}
        (at / "config.json").write_text(json.dumps(config))
        spec = read_model(at)
        size = weight_bytes(spec, DTYPES[spec.dtype].itemsize, lambda *_: True)
        check_disk(at, size)
        say(f"writing {model} in {name}, {layers} layers: {size / 1e9:.1f} GB")
        write_shards(at, _tensors(spec), SHARD_BYTES, None)
        say("loading it")
        found = _load(at)
        files = [file.stat().st_size for file in at.glob("*.safetensors")]
    return LoadFigures(
        model=model,
        format=name,
        layers=layers,
        checkpoint_bytes=sum(files),
        largest_file=max(files),
        **found,
    )


def check_disk(at: Path, size: int) -> None:
    free = shutil.disk_usage(at).free
    if size > MOST_DISK:
        raise UsageError(
            f"{size / 1e9:.1f} GB to write; at most {MOST_DISK / 1e9:.0f}: fewer layers"
        )
    if size + SPARE_DISK > free:
        raise UsageError(f"{size / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free: fewer layers")


def _tensors(spec: ModelSpec) -> Iterator[tuple[str, Tensor, int, int]]:
    """Quantised matrices as codes and scales, which takes less than to quantise numbers."""
    table = list(parameters(spec))
    done, total = 0, sum(parameter.count for parameter in table)
    generator, plain = torch.Generator().manual_seed(0), DTYPES[spec.dtype]
    for parameter in table:
        for piece in parameter.pieces:
            fmt = format_of(spec, parameter, piece)
            names: tuple[str, ...] = (piece.source,)
            values: tuple[Tensor, ...]
            if parameter.below is not None:
                values = (draw_parameter(parameter, piece.source, piece.shape, seed=0),)
            elif fmt is None:
                dtype = torch.float32 if parameter.kind in PRECISE_KINDS else plain
                values = (torch.randn(piece.shape, generator=generator, dtype=dtype),)
            else:
                names = fmt.names(piece.source)
                values = file_tensors(draw_stored(fmt, piece.shape, plain, generator))
            for name, value in zip(names, values, strict=True):
                done += value.numel()
                yield name, value, done, total


def _load(directory: Path) -> JSON:
    command = [sys.executable, "-m", "trueline.bench.memory", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: JSON = json.loads(done.stdout.splitlines()[-1])
    return found


def load(directory: str) -> JSON:
    """In a process that has loaded nothing before."""
    device = find_device("auto")
    torch.zeros(1000, 1000) @ torch.zeros(1000, 1000)  # what torch allocates once
    before, start = resident_bytes(), time.perf_counter()
    if before is None:
        raise UsageError("this system does not tell how much memory a process has: needs /proc")
    engine = LLMEngine(
        directory, skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=CACHE_BYTES
    )
    return {
        "device": device.kind,
        "seconds": time.perf_counter() - start,
        "peak_bytes": (peak_resident_bytes() or 0) - before,
        "loaded_bytes": tensor_bytes(local_runner(engine.core.executor).decoder),
    }


if __name__ == "__main__":
    print(json.dumps(load(sys.argv[1])))
