"""A rank reads its slices of the files, checks them, and nothing else."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

import rank_grid
from trueline.errors import CheckpointError
from trueline.models import read_model
from trueline.spec.model import ModelSpec
from trueline.spec.shard import local_spec
from trueline.weights import load, value
from trueline.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from trueline.weights.load import ASKED_AT_ONCE, load_weights
from trueline.weights.rank_ledger import HeldTensor, held_slices

Tiny = Callable[..., Path]


def held_by(model: Path, spec: ModelSpec) -> list[HeldTensor]:
    checkpoint = open_checkpoint(model)
    assert isinstance(checkpoint, Checkpoint)
    return [tensor for held in held_slices(checkpoint, spec) for tensor in held.tensors]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["width", "experts"])
@pytest.mark.parametrize("stored", rank_grid.STORED)
def test_what_others_hold_is_neither_read_nor_checked(
    stored: str, expert_parallel: bool, tiny: Tiny, tmp_path: Path
) -> None:
    """Every byte that rank 1 of 4 does not hold is 0xff: NaN codes, NaN scales, NaN numbers."""
    model = rank_grid.make(tiny, "deepseek_v3", stored)
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    whole = read_model(model)
    first, second = (local_spec(whole, r, 4, expert_parallel=expert_parallel) for r in (0, 1))
    for file in damaged.glob("*.safetensors"):
        raw = file.read_bytes()
        mine = [part for part in held_by(damaged, second) if part.tensor.file == file]
        start = 8 + int.from_bytes(raw[:8], "little")
        spoiled = bytearray(raw[:start] + b"\xff" * (len(raw) - start))
        for begin, end in (run for part in mine for run in part.byte_ranges()):
            spoiled[begin:end] = raw[begin:end]
        file.write_bytes(spoiled)
    wanted = load_weights(model, second, dtype=torch.float32)
    found = load_weights(damaged, second, dtype=torch.float32)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    if stored in ("plain", "fused"):
        return
    with pytest.raises(CheckpointError, match="accepted"):
        load_weights(damaged, first, dtype=torch.float32)


def test_pages_are_those_of_the_bytes() -> None:
    """Small pages, so that slices begin and end in, before and after them."""
    shape = (3, 5, 7)
    cuts = [[slice(a, b) for a in range(0, n, 2) for b in range(a + 1, n + 1)] for n in shape]
    for slices, page in product(list(product(*cuts)), (1, 2, 4, 8, 16, 64, 1024)):
        for begin in (0, 13, 64):
            tensor = StoredTensor(
                name="t", dtype="I16", shape=shape, file=Path("f"), begin=begin, end=begin + 210
            )
            held = HeldTensor(tensor, slices)
            runs = list(held.pages(page))
            bytes_ = (at for low, high in held.byte_ranges() for at in range(low, high))
            wanted = sorted({at // page for at in bytes_})
            assert [
                at for low, high in runs for at in range(low // page, -(-high // page))
            ] == wanted
            assert all(low % page == high % page == 0 for low, high in runs)
            ends = [high for _, high in runs[:-1]]
            assert all(high < low for high, (low, _) in zip(ends, runs[1:], strict=True))


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the system reads ahead as it likes")
def test_the_pages_of_slices_are_asked_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them before they are read, and none that the rank holds nothing of: rows of 12 kB
    have pages between two slices."""
    keys = {
        "num_attention_heads": 8,
        "v_head_dim": 384,
        "hidden_size": 320,
        "n_routed_experts": 8,
        "moe_intermediate_size": 256,
        "vocab_size": 312,
        "intermediate_size": 88,
    }
    model = tiny("deepseek_v3", keys=keys)
    asked: list[tuple[int, int]] = []

    class Map(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            if option == mmap.MADV_WILLNEED:
                asked.append((start, length))
            super().madvise(option, start, length)

    monkeypatch.setattr(mmap, "mmap", Map)
    spec = local_spec(read_model(model), 3, 8)
    load_weights(model, spec, dtype=torch.float32)
    page = mmap.PAGESIZE
    pages = [at // page for start, length in asked for at in range(start, start + length, page)]
    held = held_by(model, spec)
    bytes_ = [run for part in held for run in part.byte_ranges()]
    wanted = {at for low, high in bytes_ for at in range(low // page, -(-high // page))}
    assert set(pages) == wanted
    assert max(length for _, length in asked) <= ASKED_AT_ONCE
    size = (model / "model.safetensors").stat().st_size
    assert len(wanted) * page < size / 2


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the system reads ahead as it likes")
def test_pages_are_asked_for_no_further_ahead_than_storage_needs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that nobody has read yet are dropped first where memory is short. Parts that are larger
    than that, and many small ones; each page once, and before it is read."""
    keys = {"n_routed_experts": 32, "moe_intermediate_size": 24, "vocab_size": 2000}
    model = tiny("deepseek_v4", keys=keys)
    asked: list[tuple[int, int]] = []

    class Map(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            if option == mmap.MADV_WILLNEED:
                asked.append((start, length))

    monkeypatch.setattr(mmap, "mmap", Map)
    monkeypatch.setattr(load, "AHEAD", ahead := 1 << 14)
    monkeypatch.setattr(load, "ASKED_AT_ONCE", at_once := 1 << 12)
    monkeypatch.setattr(value, "CHUNK", 1 << 12)
    spec = read_model(model)
    stored = load.StoredWeights(model, spec, dtype=torch.float32)
    for name in list(stored):
        asked.clear()
        weight = stored.pop(name)
        assert sum(length for _, length in asked) <= ahead + at_once
        size = sum(part.stored.nbytes for part in weight.parts)
        weight.dequantise()
        assert size <= sum(length for _, length in asked) <= size + 2 * at_once * len(weight.parts)
        assert len(set(asked)) >= len(asked) - len(weight.parts)  # neighbours share a page
