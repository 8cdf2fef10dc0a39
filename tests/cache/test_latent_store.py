"""The paged latent cache: rows are read where they were written, poison hits what it names."""

from __future__ import annotations

import pytest
import torch

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore

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


def test_cells_of_positions() -> None:
    layout = LatentLayout(6, 4, 3)
    assert layout.cells([4, 1, 2], 1, 8) == [13, 14, 3, 4, 5, 6, 7]
    assert [layout.cell(b, p) for b, p in ((4, 1), (1, 5), (2, 6))] == [13, 5, 6]
