"""The indexer's cache: every byte has one address, which the layout alone gives."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.index import IndexStore
from trueline.cache.layout import AMAX_FLOOR, INDEX_LAYOUTS, STORAGES, IndexLayout
from trueline.errors import UsageError
from trueline.ops.index_scores.reference import read_keys
from trueline.verify.ops import randn
from trueline.verify.sparse import BLOCK_SIZES, layouts

FP8 = ("e4m3fn", "e4m3fnuz")
ALL = [layout for storage in STORAGES for layout in layouts(storage)]


def names(layout: IndexLayout) -> str:
    return f"{layout.storage}-{layout.kind}-{layout.block_size}"


def poisoned(layout: IndexLayout, num_blocks: int = 5, num_layers: int = 2) -> IndexStore:
    store = IndexStore(layout, num_layers, num_blocks)
    store.poison(range(num_blocks))
    return store


def key_addresses(layout: IndexLayout, cell: int) -> list[int]:
    return [layout.key_start(cell) + layout.key_offset(b) for b in range(layout.key_bytes)]


# -- addresses -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ALL, ids=names)
def test_every_byte_of_a_block_belongs_to_one_cell(layout: IndexLayout) -> None:
    size, found = layout.block_size, []
    for cell in range(3 * size, 4 * size):
        found += key_addresses(layout, cell)
        if layout.fp8:
            found += range(layout.scale_start(cell), layout.scale_start(cell) + 4)
    assert sorted(found) == list(range(3 * layout.block_bytes, 4 * layout.block_bytes))


@pytest.mark.parametrize("layout", ALL, ids=names)
def test_addresses_of_tensors_are_those_of_cells(layout: IndexLayout) -> None:
    cells = torch.randperm(4 * layout.block_size)
    for address in (layout.key_start, layout.scale_start):
        assert address(cells).tolist() == [address(cell) for cell in cells.tolist()]


def test_known_addresses() -> None:
    """Written out by hand: the second token of block 1, key bytes 0, 16 and 17, and its scale."""
    wanted = {
        "rows": [2112 + 132, 2112 + 148, 2112 + 149, 2112 + 132 + 128],
        "planar": [2112 + 128, 2112 + 144, 2112 + 145, 2112 + 2048 + 4],
        "shuffled": [2112 + 16, 2112 + 272, 2112 + 273, 2112 + 2048 + 4],
    }
    for kind, addresses in wanted.items():
        layout = IndexLayout(128, 16, "e4m3fn", kind)
        assert layout.token_bytes == 132
        key = key_addresses(layout, 17)
        assert [key[0], key[16], key[17], layout.scale_start(17)] == addresses
    third_group = IndexLayout(128, 64, "e4m3fn", "shuffled").key_start(35)
    assert third_group == 2 * 16 * 128 + 3 * 16


@pytest.mark.parametrize("storage", FP8)
def test_rows_and_planar_coincide_at_block_size_1_only(storage: str) -> None:
    for size in (1, 2, 16):
        rows, planar = (IndexLayout(48, size, storage, kind) for kind in ("rows", "planar"))
        same = all(
            key_addresses(rows, c) == key_addresses(planar, c)
            and rows.scale_start(c) == planar.scale_start(c)
            for c in range(5 * size)
        )
        assert same == (size == 1)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((48, 1, "e4m3fn", "shuffled"), "block_size = 1: the shuffled layout takes multiples of"),
        ((48, 24, "e4m3fn", "shuffled"), "block_size = 24"),
        ((37, 16, "e4m3fn", "shuffled"), "key bytes = 37"),
        ((8, 16, "e4m3fnuz", "shuffled"), "key bytes = 8"),
        ((48, 16, "e4m3", "rows"), "storage = 'e4m3': accepted: ('float32'"),
        ((48, 16, "float32", "SHUFFLE"), "layout = 'SHUFFLE': accepted: ('rows'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(arguments: Any, part: str) -> None:
    with pytest.raises(UsageError) as refused:
        IndexLayout(*arguments)
    assert part in str(refused.value)


@pytest.mark.parametrize("layout", ALL, ids=names)
def test_memory_is_what_the_layout_says(layout: IndexLayout) -> None:
    store = IndexStore(layout, 3, 7)
    assert store.bytes.nbytes == 7 * IndexStore.block_bytes(layout, 3)
    assert layout.block_bytes == layout.block_size * layout.token_bytes


# -- writing and reading ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ALL, ids=names)
def test_a_write_touches_its_own_bytes_alone(layout: IndexLayout) -> None:
    store = poisoned(layout)
    cells = torch.randperm(5 * layout.block_size)[: 2 * layout.block_size + 1]
    before = store.bytes.clone()
    keys = randn(len(cells), layout.dim + 3)[:, 1:-2]  # strided
    given = keys.clone()
    store.views[1].write(cells, keys)
    assert torch.equal(keys, given)
    changed = set((store.bytes != before).nonzero()[:, 1].tolist())
    assert torch.equal(store.bytes[0], before[0])
    own: set[int] = set()
    for cell in cells.tolist():
        own.update(key_addresses(layout, cell))
        own.update(range(layout.scale_start(cell), layout.scale_start(cell) + 4))
    assert changed <= own
    block_ids = list(range(5))
    assert torch.equal(
        store.views[1].read(cells).double(),
        read_keys(store.views[1], block_ids, 5 * layout.block_size)[cells],
    )


@pytest.mark.parametrize("kind", INDEX_LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_stored_is_the_nearest_number(storage: str, kind: str) -> None:
    layout = IndexLayout(64, 16, storage, kind)
    view = poisoned(layout).views[0]
    cells, keys = torch.arange(20), 3 * randn(20, 64)
    for narrow in (torch.float32, torch.bfloat16, torch.float64):
        view.write(cells, keys.to(narrow))
        given = keys.to(narrow).float()
        if layout.fp8 is None:
            assert torch.equal(view.read(cells), given.to(DTYPES[storage]).float())
            continue
        scales = view.scales(cells)[:, None]
        table = codes(storage)
        table = table[table.isfinite()]
        gaps = (given[:, :, None] - scales[:, :, None] * table).abs().amin(-1)
        assert torch.equal((view.read(cells) - given).abs(), gaps)


def codes(storage: str) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(DTYPES[storage]).float()


@pytest.mark.parametrize("storage", FP8)
def test_scales(storage: str) -> None:
    fp8 = STORAGES[storage].fp8
    assert fp8 is not None
    assert codes(storage).nan_to_num(0).max() == fp8.largest
    assert codes(storage)[fp8.nan].isnan()
    assert codes(storage)[1] == fp8.step
    cells, keys = torch.arange(40), randn(40, 48) * torch.logspace(-5, 5, 40)[:, None]
    keys[7] = 0
    keys[8] = fp8.largest * 2.0**-3 * torch.linspace(-1, 1, 48)
    keys[9] = keys[8].nextafter(keys[8] * torch.inf)  # one bit too large for that scale
    for power_of_two in (True, False):
        layout = IndexLayout(48, 16, storage, "planar", power_of_two)
        view = poisoned(layout).views[0]
        view.write(cells, keys)
        amax = keys.abs().amax(1).clamp_min(AMAX_FLOOR).double()
        for scale, largest in zip(view.scales(cells).tolist(), amax.tolist(), strict=True):
            if not power_of_two:
                assert scale == torch.tensor(largest / fp8.largest).float().item()
                continue
            assert math.frexp(scale)[0] == 0.5
            assert fp8.largest * scale / 2 < largest <= fp8.largest * scale
        assert (view.read(cells)[7] == 0).all()
    assert IndexLayout(48, 16, storage, "rows").power_of_two  # documented


@pytest.mark.parametrize(
    ("storage", "bad"), list(product(STORAGES, (math.nan, math.inf, -math.inf)))
)
def test_a_key_that_is_no_number_stays_visible(storage: str, bad: float) -> None:
    view = poisoned(IndexLayout(48, 16, storage, "rows")).views[0]
    keys = randn(3, 48)
    keys[1, 5] = bad
    view.write(torch.arange(3), keys)
    read = view.read(torch.arange(3))
    assert not read[1, 5].isfinite()
    assert read[[0, 2]].isfinite().all()


@pytest.mark.parametrize("layout", ALL, ids=names)
def test_poison(layout: IndexLayout) -> None:
    store = IndexStore(layout, 2, 5)
    size = layout.block_size
    every = torch.arange(5 * size)
    for view in store.views:
        view.write(every, randn(5 * size, layout.dim))
    kept = [view.read(every) for view in store.views]
    store.poison([3])
    store.poison_cells([1, 4 * size])
    gone = torch.zeros(5 * size, dtype=torch.bool)
    gone[[1, 4 * size, *range(3 * size, 4 * size)]] = True
    for view, before in zip(store.views, kept, strict=True):
        read = view.read(every)
        assert read[gone].isnan().all()
        assert torch.equal(read[~gone], before[~gone])
        if layout.fp8:
            assert view.scales(every)[gone].isnan().all()
            numbers = view.bytes[view.layout.key_start(every[gone])].view(DTYPES[layout.storage])
            assert numbers.float().isnan().all()  # by its bytes as well
    store.poison([])  # nobody's


def test_all_block_sizes_are_here() -> None:
    assert set(BLOCK_SIZES) == {1, 2, 16, 64, 128}
    assert {layout.block_size for layout in ALL if layout.kind == "shuffled"} == {16, 64, 128}
