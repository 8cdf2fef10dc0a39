"""What an indexer writes and turns before scores, and what is left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trueline.cache.index import IndexStore
from trueline.cache.layout import GROUP, KINDS, SCALE_BYTES, STORAGES, IndexLayout
from trueline.ops.index_scores.reference import read_keys
from trueline.ops.index_write import reference as exact
from trueline.ops.registry import reasons
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing
from trueline.verify.ops.data import close, randn, require

DIM, ROPE, HEADS = 48, 20, 5
PAIRINGS: tuple[Pairing, ...] = ("pairs", "halves")
BLOCKS = 6
ROUNDING = {"float32": 3e-7, "float16": 2.0**-10, "bfloat16": 2.0**-7, "e4m3fn": 0.03,
            "e4m3fnuz": 0.03}  # fmt: skip
"""Largest error of a stored key, relative to it: a number at the edge may round either way."""


def turning(n: int, pairing: Pairing) -> dict[str, Any]:
    """Angles of a wider table."""
    angles = 100 * randn(n, ROPE // 2 + 3, seed=3)[:, 1:-2]
    return {"cos": 1.3 * angles.cos(), "sin": 1.3 * angles.sin(), "pairing": pairing, "rope": rope}


def places(storage: str) -> Iterator[IndexLayout]:
    for size in (1, 16):
        for kind in KINDS:
            if kind != "shuffled" or size % GROUP == 0:
                yield IndexLayout(DIM, size, storage, kind)
    yield IndexLayout(DIM, 16, storage, "planar", power_of_two=False)


def index_write(
    op: Any, dtype: torch.dtype = torch.float32, storages: Iterable[str] = STORAGES
) -> None:
    """Parts of a wider product, scattered cells; no byte of another cell is written."""
    for storage in storages:
        for layout in places(storage):
            if not reasons(op, dtype, False, layout):
                for pairing in PAIRINGS:
                    _writes(op, dtype, layout, pairing)


def _writes(op: Any, dtype: torch.dtype, layout: IndexLayout, pairing: Pairing) -> None:
    what = f"index_write, {layout.storage}, {layout.kind}, blocks of {layout.block_size}, {pairing}"
    count = BLOCKS * layout.block_size
    n = min(5, count)
    whole = (randn(n, DIM + 7, seed=n) * 3 + 1).to(dtype)
    key, before = whole[:, 4:-3], whole.clone()
    options = {
        "norm": (0.5 + randn(DIM, seed=2).abs()).to(dtype),
        "bias": randn(DIM, seed=4).to(dtype),
        "eps": 0.3,
        **turning(n, pairing),
    }
    cells = (torch.arange(n) * 7 + 2) % count
    stores = [IndexStore(layout, 2, BLOCKS) for _ in range(2)]
    for each, store in zip((op, exact), stores, strict=True):
        store.bytes.fill_(0xA5)
        each.run(key, store.views[1], cells, **options)
    require(torch.equal(whole, before), f"{what}: writes its input")
    found, wanted = (_read(store, cells) for store in stores)
    close(what, found, wanted, ROUNDING[layout.storage] + torch.finfo(dtype).eps)
    own = _touched(layout, cells)
    require(bool((stores[0].bytes[0] == 0xA5).all()), f"{what}: writes another layer")
    require(bool((stores[0].bytes[1][~own] == 0xA5).all()), f"{what}: writes cells of others")


def _read(store: IndexStore, cells: Tensor) -> Tensor:
    return read_keys(store.views[1], list(range(BLOCKS)), BLOCKS * store.layout.block_size)[cells]


def _touched(layout: IndexLayout, cells: Tensor) -> Tensor:
    """[bytes of a layer]: those of the cells."""
    found: list[int] = []
    for cell in cells.tolist():
        start, scale = layout.key_start(cell), layout.scale_start(cell)
        found += [start + layout.key_offset(byte) for byte in range(layout.key_bytes)]
        found += range(scale, scale + SCALE_BYTES if layout.fp8 else scale)
    own = torch.zeros(BLOCKS * layout.block_bytes, dtype=torch.bool)
    own[torch.tensor(found)] = True
    return own


def index_turn(op: Any, dtype: torch.dtype = torch.float32) -> None:
    for pairing in PAIRINGS:
        for n, heads in ((1, 1), (4, HEADS), (3, 17)):
            wide = randn(n, heads + 1, DIM + 3, seed=n).to(dtype)
            q, before = wide[:, 1:, 2:-1], wide.clone()
            ours, wanted = (each.turn(q, **turning(n, pairing)) for each in (op, exact))
            what = f"index_write, {heads} heads turned in {pairing}"
            require(torch.equal(wide, before), f"{what}: writes its input")
            require(ours.dtype == dtype, f"{what}: {ours.dtype}")
            gate = 3e-7 if dtype == torch.float32 else torch.finfo(dtype).eps
            close(what, ours, wanted, gate)
            rest = slice(ROPE, None)
            require(torch.equal(ours[..., rest], q[..., rest]), f"{what}: changes other channels")
