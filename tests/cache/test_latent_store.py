"""The paged latent cache: rows are read where they were written, poison hits what it names."""

from __future__ import annotations

import pytest
import torch

from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.cache.store import LatentStore, fp8_parts
from trueline.errors import UsageError

LAYERS, BLOCKS = 2, 5


@pytest.fixture(params=[1, 3, 16])
def store(request: pytest.FixtureRequest) -> LatentStore:
    made = LatentStore(LatentLayout(6, 4, request.param), LAYERS, BLOCKS, torch.float32)
    for number, view in enumerate(made.views):
        cells = torch.arange(BLOCKS * request.param)
        rows = 1000.0 * number + torch.arange(len(cells) * 10).view(-1, 10)
        view.write(cells, rows[:, :6], rows[:, 6:])
    return made


def test_rows_are_read_where_they_were_written(store: LatentStore) -> None:
    cells = torch.randperm(BLOCKS * store.layout.block_size).view(BLOCKS, -1)
    for number, view in enumerate(store.views):
        read = view.gather(cells)
        assert read.shape == (*cells.shape, 10)
        assert torch.equal(read, 1000.0 * number + cells[..., None] * 10 + torch.arange(10.0))
        assert not view.rows[view.zero_cell].any()


def test_poison(store: LatentStore) -> None:
    size = store.layout.block_size
    before = store.rows.clone()
    store.poison([3])
    store.poison_cells([1, 4 * size])
    gone = torch.zeros(BLOCKS * size + 1, dtype=torch.bool)
    gone[[1, 4 * size, *range(3 * size, 4 * size)]] = True
    assert store.rows[:, gone].isnan().all()
    assert torch.equal(store.rows[:, ~gone], before[:, ~gone])


def test_memory_is_what_the_layout_says(store: LatentStore) -> None:
    """And one row of zeros a layer, which belongs to no block."""
    each = LatentStore.block_bytes(store.layout, LAYERS, torch.float32)
    assert store.rows.nbytes == BLOCKS * each + LAYERS * 10 * 4


def test_the_row_of_a_public_cache() -> None:
    """DeepSeek-V3.2's: 512 codes, four float32 scales, 64 bfloat16 numbers."""
    layout = LatentLayout(512, 64, 64, LatentFp8("e4m3fn", "bfloat16", 128))
    assert layout.row_bytes(torch.bfloat16.itemsize) == 656
    assert (layout.scales_start, layout.num_groups, layout.rope_start) == (512, 4, 528)
    view = LatentStore(layout, 1, 1, torch.bfloat16).views[0]
    row = torch.ones(1, 576)
    row[0, 128:256], row[0, 300] = -0.25, 7.0
    view.write(torch.tensor([5]), row[:, :512], row[:, 512:])
    (stored,) = view.rows[5:6]
    assert stored[:128].tolist() == [0x7E] * 128  # 448, the largest code
    assert stored[128:256].tolist() == [0xFE] * 128
    assert stored[300] == 0x7E
    scales = torch.tensor([1.0, 0.25, 7.0, 1.0]) / 448
    assert torch.equal(stored[512:528].view(torch.float32), scales)
    assert torch.equal(stored[528:].view(torch.bfloat16), torch.ones(64, dtype=torch.bfloat16))


@pytest.mark.parametrize(("latent", "group", "wanted"), [
    (37, 16, (40, 3, 52, 72)),
    (37, 37, (40, 1, 44, 64)),
    (37, 128, (40, 1, 44, 64)),
    (36, 18, (36, 2, 44, 64)),
])  # fmt: skip
def test_parts_begin_at_multiples_of_four(latent: int, group: int, wanted: tuple[int, ...]) -> None:
    layout = LatentLayout(latent, 9, 1, LatentFp8("e4m3fn", "float16", group))
    starts = (layout.scales_start, layout.num_groups, layout.rope_start)
    assert (*starts, layout.row_bytes(2)) == wanted


def test_poison_of_fp8_rows() -> None:
    """By the code, by the scale and by the key: each alone is enough."""
    layout = LatentLayout(6, 4, 2, LatentFp8("e4m3fnuz", "float32", 4))
    store = LatentStore(layout, 2, 3, torch.float32)
    store.randomise(range(3))
    before = store.rows.clone()
    store.poison([1])
    store.poison_cells([5])
    gone = torch.tensor([False, False, True, True, False, True, False])
    assert torch.equal(store.rows[:, ~gone], before[:, ~gone])
    codes, scales, rope = fp8_parts(store.rows[:, gone], layout)
    assert codes.float().isnan().all()
    assert scales.isnan().all()
    assert rope.isnan().all()
    read = store.views[1].gather(torch.arange(7))
    assert torch.equal(read.isnan().all(1), gone)
    assert torch.equal(read.isnan().any(1), gone)
    assert not read[6].any()  # the row for masked positions


def test_an_unknown_storage_is_named() -> None:
    with pytest.raises(UsageError, match="storage = 'int8': accepted"):
        LatentFp8("int8", "float32", 128)


def test_cells_of_positions() -> None:
    layout = LatentLayout(6, 4, 3)
    assert layout.cells([4, 1, 2], 1, 8) == [13, 14, 3, 4, 5, 6, 7]
    assert [layout.cell(b, p) for b, p in ((4, 1), (1, 5), (2, 6))] == [13, 5, 6]
