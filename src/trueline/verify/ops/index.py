"""What an indexer writes and rotates before scores, and what is left alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

import torch
from torch import Tensor

from trueline.cache.index import IndexStore
from trueline.cache.layout import GROUP, INDEX_LAYOUTS, SCALE_BYTES, STORAGES, IndexLayout
from trueline.ops.capabilities import Context
from trueline.ops.index_scores.reference import read_keys
from trueline.ops.index_write import IndexWrite
from trueline.ops.index_write import reference as exact
from trueline.ops.rope import Rope
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing
from trueline.verify.bounds import norm_bound, rounding
from trueline.verify.ops.basic import ROTATION
from trueline.verify.ops.data import close, randn, require, within

DIM, ROPE, HEADS = 48, 20, 5
PAIRINGS: tuple[Pairing, ...] = ("interleaved", "half-split")
BLOCKS = 6
STEP = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7, "e4m3fn": 2.0**-3,
        "e4m3fnuz": 2.0**-3}  # fmt: skip
"""From a stored number to the next: one at the edge may round either way."""


class Rotation(TypedDict):
    cos: Tensor
    sin: Tensor
    pairing: Pairing
    rope: Rope


def rotation(n: int, pairing: Pairing, width: int = ROPE) -> Rotation:
    """Angles of a wider table."""
    angles = 100 * randn(n, width // 2 + 3, seed=3)[:, 1:-2]
    return {"cos": 1.3 * angles.cos(), "sin": 1.3 * angles.sin(), "pairing": pairing, "rope": rope}


def places(storage: str) -> Iterator[IndexLayout]:
    for size in (1, 16):
        for kind in INDEX_LAYOUTS:
            if kind != "shuffled" or size % GROUP == 0:
                yield IndexLayout(DIM, size, storage, kind)
    yield IndexLayout(DIM, 16, storage, "planar", power_of_two=False)


def index_write(
    op: IndexWrite, dtype: torch.dtype = torch.float32, storages: Iterable[str] = STORAGES
) -> None:
    """Columns of a wider projection, scattered cells; no byte of another cell is written."""
    for storage in storages:
        for layout in places(storage):
            if not op.capabilities.refusals(Context(dtype=dtype, index=layout)):
                for pairing in PAIRINGS:
                    writes(op, dtype, layout, pairing, ROPE)


def writes(
    op: IndexWrite, dtype: torch.dtype, layout: IndexLayout, pairing: Pairing, turned: int
) -> None:
    """`turned`: channels that rotate."""
    dim = layout.dim
    what = f"index_write, {layout.storage}, {layout.kind}, blocks of {layout.block_size}, {pairing}"
    count = BLOCKS * layout.block_size
    n = min(5, count)
    whole = (randn(n, dim + 7, seed=n) * 3 + 1).to(dtype)
    key, before = whole[:, 4:-3], whole.clone()
    norm, bias = (0.5 + randn(dim, seed=2).abs()).to(dtype), randn(dim, seed=4).to(dtype)
    cells = (torch.arange(n) * 7 + 2) % count
    stores = [IndexStore(layout, 2, BLOCKS) for _ in range(2)]
    eps = {"interleaved": 0.3, "half-split": 0.1}[pairing]
    ops: tuple[IndexWrite, ...] = (op, exact)
    for each, store in zip(ops, stores, strict=True):
        store.bytes.fill_(0xA5)
        view = store.views[1]
        turn = rotation(n, pairing, turned)
        each.run(key, view, cells, norm=norm, bias=bias, eps=eps, **turn)
    require(torch.equal(whole, before), f"{what}: writes its input")
    found, wanted = (_read(store, cells) for store in stores)
    # the mean is of numbers as large as those that it is taken off; then as a norm
    relative = 2 * norm_bound(dim) + rounding(ROTATION) + rounding(2, dtype)
    limit = relative * wanted.norm(dim=-1) + STEP[layout.storage] * wanted.abs().amax(-1)
    within(what, found, wanted, limit[:, None])
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


def index_rotate(
    op: IndexWrite,
    dtype: torch.dtype = torch.float32,
    shapes: Iterable[tuple[int, int]] = ((1, 1), (4, HEADS), (3, 17)),
    dims: tuple[int, int] = (DIM, ROPE),
) -> None:
    """`shapes`: tokens and heads; `dims`: of a head, and those that rotate."""
    ops: tuple[IndexWrite, ...] = (op, exact)
    dim, turned = dims
    for pairing in PAIRINGS:
        for n, heads in shapes:
            wide = randn(n, heads + 1, dim + 3, seed=n).to(dtype)
            q, before = wide[:, 1:, 2:-1], wide.clone()
            ours, wanted = (each.rotate(q, **rotation(n, pairing, turned)) for each in ops)
            what = f"index_write, {heads} heads rotated in {pairing}"
            require(torch.equal(wide, before), f"{what}: writes its input")
            require(ours.dtype == dtype, f"{what}: {ours.dtype}")
            close(what, ours, wanted, rounding(ROTATION) + rounding(2, dtype))
            rest = slice(turned, None)
            require(torch.equal(ours[..., rest], q[..., rest]), f"{what}: changes other channels")
