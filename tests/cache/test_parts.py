"""What canaries add up: every byte of a store in exactly one row, at the address of its layout."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from trueline.cache.index import IndexStore
from trueline.cache.layout import IndexLayout, LatentFp8, LatentLayout
from trueline.cache.parts import Part
from trueline.cache.state import StateStore
from trueline.cache.store import LatentStore
from trueline.cache.tails import TailLayout, TailStore

L, P = 2, 4
"""Layers, places."""
FP8 = LatentFp8(storage="e4m3fn", rope="float32", group=4)
LATENTS = {
    "float32": (LatentLayout(5, 2, 3), torch.float32),
    "bfloat16": (LatentLayout(5, 2, 3), torch.bfloat16),
    "fp8": (LatentLayout(6, 2, 3, FP8), torch.float32),
}
INDEX = [
    IndexLayout(dim, size, storage, kind)
    for dim, size, storage, kind in product(
        (3, 16), (1, 5, 32), ("float32", "float16", "e4m3fn"), ("rows", "planar", "shuffled")
    )
    if kind != "shuffled" or (dim == 16 and size == 32)
]


def changed(part: Part, memory: Tensor, layer: int, byte: int) -> list[tuple[int, int, int]]:
    """(layer, place, row) of the sums that another byte of a layer's memory changes."""
    everything = torch.arange(part.num_places)
    before = part.sums(everything)
    flat = memory[layer].reshape(-1).view(torch.uint8)
    flat[byte] ^= 0x40
    after = part.sums(everything)
    flat[byte] ^= 0x40
    return [(int(a), int(b), int(c)) for a, b, c in (before != after).nonzero()]


def owners(parts: list[Part], memory: Tensor) -> Counter[int]:
    """By byte of a layer, how many rows it is in; each is the one that `byte` says."""
    found: Counter[int] = Counter()
    for layer, part in product(range(L), parts):
        starts = {(p, r): part.byte(p, r) for p in range(part.num_places) for r in rows_of(part)}
        for byte in range(memory[layer].nbytes):
            hit = changed(part, memory, layer, byte)
            assert len(hit) <= 1
            for where, place, row in hit:
                assert where == layer
                assert starts[place, row] <= byte
                found[byte] += 1
    return found


def rows_of(part: Part) -> range:
    return range(part.num_rows)


@pytest.mark.parametrize("name", LATENTS)
def test_every_byte_of_latents(name: str) -> None:
    """The row of zeros is a part of its own."""
    layout, dtype = LATENTS[name]
    store = LatentStore(layout, L, P, dtype)
    store.rows.view(torch.uint8).random_()
    each = layout.row_bytes(dtype.itemsize)
    rows, zeros = store.parts()
    assert (rows.num_places, rows.num_rows, rows.row_bytes) == (P, 3, each)
    assert rows.byte(2, 1) == (2 * 3 + 1) * each
    assert (rows.constant, zeros.constant) == (False, True)
    assert zeros.byte(0, 0) == P * 3 * each
    every = owners([rows, zeros], store.rows)
    assert every == dict.fromkeys(range(store.rows[0].nbytes), L)


@pytest.mark.parametrize(
    "layout", INDEX, ids=lambda x: f"{x.kind}-{x.storage}-{x.dim}-{x.block_size}"
)
def test_every_byte_of_index_keys(layout: IndexLayout) -> None:
    """A key by its token's row, in whatever runs it lies; so its scale."""
    store = IndexStore(layout, L, P)
    store.bytes.random_()
    parts = store.parts()
    assert [part.name for part in parts] == ["keys", "scales"][: 1 + bool(layout.fp8)]
    for cell in range(P * layout.block_size):
        place, row = divmod(cell, layout.block_size)
        assert parts[0].byte(place, row) == layout.key_start(cell)
        last = layout.key_start(cell) + layout.key_offset(layout.key_bytes - 1)
        assert changed(parts[0], store.bytes, 1, last) == [(1, place, row)]
        if layout.fp8:
            assert parts[1].byte(place, row) == layout.scale_start(cell)
            assert changed(parts[1], store.bytes, 0, layout.scale_start(cell) + 3) == [
                (0, place, row)
            ]
    per_token = sum(part.row_bytes for part in parts)
    assert per_token == layout.token_bytes
    assert {part.num_rows for part in parts} == {layout.block_size}


def test_every_byte_of_tails() -> None:
    store = TailStore(TailLayout(3, 2, overlap=True, block_size=4), L, P)
    store.rows.view(torch.uint8).random_()
    (part,) = store.parts()
    assert (part.num_places, part.num_rows) == (P, 4)
    assert part.byte(1, 2) == 6 * part.row_bytes == 6 * store.layout.row_bytes
    assert owners([part], store.rows) == dict.fromkeys(range(store.rows[0].nbytes), L)


@pytest.mark.parametrize("tail", [0, 8])
def test_every_byte_of_states(tail: int) -> None:
    """By head."""
    store = StateStore(L, P, heads=3, dk=2, dv=4, dtype=torch.float32, tail=tail)
    memory = {"state": store.state, "tail's keys": store.keys, "tail's values": store.values}
    parts = store.parts()
    assert [part.name for part in parts] == list(memory)[: 3 if tail else 1]
    for part in parts:
        kept = memory[part.name]
        kept.view(torch.uint8).random_()
        assert (part.num_places, part.num_rows) == (P, 3)
        assert owners([part], kept) == dict.fromkeys(range(kept[0].nbytes), L)
