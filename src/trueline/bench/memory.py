"""Host memory, bytes read and time while the files of a model in a stored format are loaded: a
checkpoint of published widths, cut to a few layers, is written, and then loaded whole and by each
of several ranks, each time by a process of its own, one after the other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.formats import format_config
from trueline.bench.rank_load import RankLoad, forget_files, readahead_bytes
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec
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
OTHER_READS = 256 << 20
"""Modules and libraries that loading imports, or that were dropped meanwhile for want of memory."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One rank's, or those of the whole."""

    model: str
    format: str
    layers: int
    checkpoint_bytes: int
    """Of all files."""
    largest_file: int
    readahead: int | None
    """Where the files are."""
    load: RankLoad

    @property
    def limit(self) -> int:
        """A GPU holds the weights itself."""
        on_host = self.load.loaded_bytes if self.load.device == "cpu" else 0
        return on_host + self.largest_file + SLACK

    @property
    def read_limit(self) -> int | None:
        """Whole pages, and before and after each stretch as far as the system reads ahead; at most
        the files."""
        if self.readahead is None:
            return None
        pages = self.load.page_bytes + 2 * self.readahead * self.load.stretches
        return min(pages, self.checkpoint_bytes) + OTHER_READS

    @property
    def cached(self) -> bool:
        """The page cache had some of the files: less came from storage than the rank holds."""
        return self.load.read_bytes is not None and self.load.read_bytes < self.load.slice_bytes

    @property
    def met(self) -> bool:
        read, limit = self.load.read_bytes, self.read_limit
        only_its_own = read is None or limit is None or self.cached or read <= limit
        return self.load.peak_bytes <= self.limit and only_its_own

    def as_json(self) -> JSON:
        found = asdict(self)
        load = found.pop("load")
        judged = {name: getattr(self, name) for name in ("limit", "read_limit", "cached", "met")}
        return {**found, **load, **judged}


def measure_load(
    model: str,
    name: str,
    layers: int,
    directory: Path | None,
    say: Callable[[str], None],
    *,
    ranks: int = 1,
    expert_parallel: bool = False,
) -> list[LoadFigures]:
    """The whole and, where there are several, every rank. `directory`: where the checkpoint is
    written and deleted; None: where temporary files are."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        at = Path(scratch)
        config = cut(format_config(model, name), layers)
        (at / "config.json").write_text(json.dumps(config))
        spec = read_model(at)
        local_spec(spec, 0, ranks, expert_parallel=expert_parallel)  # what cannot be divided
        size = weight_bytes(spec, DTYPES[spec.dtype].itemsize, lambda *_: True)
        check_disk(at, size)
        say(f"writing {model} in {name}, {layers} layers: {size / 1e9:.1f} GB")
        write_shards(at, _tensors(spec), SHARD_BYTES, None)
        files = [file.stat().st_size for file in at.glob("*.safetensors")]
        same = model, name, layers, sum(files), max(files), readahead_bytes(at)
        found = []
        for rank, of in [(0, 1), *((rank, ranks) for rank in range(ranks) if ranks > 1)]:
            forget_files(at)
            say(f"loading rank {rank} of {of}")
            found.append(LoadFigures(*same, _load(at, rank, of, expert_parallel)))
    return found


def cut(config: JSON, layers: int) -> JSON:
    """To its first layers; DeepSeek-V4 to its last, which compress, half of them hash layers."""
    short = config | {"num_hidden_layers": layers}
    if "compress_ratios" in config:
        ratios = config["compress_ratios"][: config["num_hidden_layers"]]
        short |= {"compress_ratios": ratios[-layers:], "num_hash_layers": layers // 2}
    return short


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
                values = file_tensors(draw_stored(fmt, piece.shape, plain, generator), fmt)
            for name, value in zip(names, values, strict=True):
                done += value.numel()
                yield name, value, done, total


def _load(directory: Path, rank: int, size: int, expert_parallel: bool) -> RankLoad:
    options = map(str, (directory, rank, size, int(expert_parallel)))
    command = [sys.executable, "-m", "trueline.bench.rank_load", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return RankLoad(**json.loads(done.stdout.splitlines()[-1]))
