"""One rank's part of a checkpoint, loaded by this process without the other ranks, and what that
took of memory, storage and time."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from trueline.bench.footprint import tensor_bytes
from trueline.bench.ranks.rank import Rehearsed
from trueline.config import EngineConfig
from trueline.device import (
    find_device,
    peak_resident_bytes,
    resident_bytes,
    storage_bytes_read,
)
from trueline.engine.runner import build_decoder
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.native import use_threads
from trueline.plan.plan import make_plan
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec
from trueline.weights.checkpoint import Checkpoint, open_checkpoint
from trueline.weights.load import StoredWeights
from trueline.weights.rank_ledger import HeldTensor, held_slices

CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    rank: int
    size: int
    """Of how many ranks."""
    device: str
    slice_bytes: int
    """Of the files, that the rank's ledger says it holds."""
    page_bytes: int
    """Of the pages that these are in: less than a page cannot be read."""
    stretches: int
    """Runs of neighbouring tensors of which it holds something, and a header in each file."""
    read_bytes: int | None
    """From storage, while it was loaded."""
    loaded_bytes: int
    """Of the model's tensors, once it is loaded."""
    peak_bytes: int
    """By which the process grew at most."""
    seconds: float


def load_rank_alone(
    directory: Path, rank: int, size: int, *, expert_parallel: bool = False
) -> RankLoad:
    """As the ranks of an engine do it, in a process that has loaded nothing before."""
    config = EngineConfig(
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
        max_model_len=64,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    device = find_device(config.device)
    spec = local_spec(read_model(directory), rank, size, expert_parallel=expert_parallel)
    plan = make_plan(spec, config, device)
    torch.set_num_threads(plan.threads)
    if not device.is_gpu:
        use_threads(plan.threads)
    torch.zeros(1000, 1000) @ torch.zeros(1000, 1000)  # what torch allocates once
    resident, read, start = resident_bytes(), storage_bytes_read(), time.perf_counter()
    if resident is None:
        raise UsageError("this system does not tell how much memory a process has: needs /proc")
    values = StoredWeights(directory, spec, dtype=plan.weight_dtype)
    decoder = build_decoder(spec, plan, values, Rehearsed(size))
    seconds, read_after = time.perf_counter() - start, storage_bytes_read()
    peak = (peak_resident_bytes() or 0) - resident
    checkpoint = open_checkpoint(directory)
    assert checkpoint is not None
    held = slices(checkpoint, spec)
    return RankLoad(
        rank=rank,
        size=size,
        device=device.kind,
        slice_bytes=sum(each.nbytes for each in held),
        page_bytes=page_bytes(held, mmap.PAGESIZE),
        stretches=stretches(checkpoint, held),
        read_bytes=None if read is None or read_after is None else read_after - read,
        loaded_bytes=tensor_bytes(decoder),
        peak_bytes=peak,
        seconds=seconds,
    )


def slices(checkpoint: Checkpoint, spec: ModelSpec) -> list[HeldTensor]:
    return [tensor for held in held_slices(checkpoint, spec) for tensor in held.tensors]


def page_bytes(held: list[HeldTensor], page: int) -> int:
    """A page that several slices share counts once."""
    ranges = sorted((each.tensor.file, *run) for each in held for run in each.pages(page))
    total, last = 0, (Path(), 0)
    for file, begin, end in ranges:
        done = last[1] if file == last[0] else 0
        total += max(end - max(begin, done), 0)
        last = file, max(end, done)
    return total


def stretches(checkpoint: Checkpoint, held: list[HeldTensor]) -> int:
    tensors = sorted({(each.tensor.file, each.tensor.begin, each.tensor.end) for each in held})
    breaks = sum(a[0] != b[0] or a[2] != b[1] for a, b in pairwise(tensors))
    return breaks + 1 + len(checkpoint.files)


def readahead_bytes(at: Path) -> int | None:
    """How far the system reads ahead in files there; None where it does not tell."""
    device = at.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        return int(Path(f"/sys/class/bdi/{name}/read_ahead_kb").read_text()) << 10
    except (OSError, ValueError):
        return None


def forget_files(at: Path) -> None:
    """Puts the files of a directory out of the page cache, where the system honours that."""
    for file in at.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    at, rank, size, expert_parallel = sys.argv[1:]
    found = load_rank_alone(Path(at), int(rank), int(size), expert_parallel=expert_parallel == "1")
    print(json.dumps(asdict(found)))
