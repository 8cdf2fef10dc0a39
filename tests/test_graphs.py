"""Captured decode steps: the fixed buffers they read, and what padding may not do."""

from __future__ import annotations

import pytest
import torch

from trueline.engine.graphs import FIELDS, FixedInputs, ladder
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import heads_are_padded
from trueline.verify.seed.gpu import GPU_FAULTS


@pytest.mark.parametrize("heads", [1, 4, 8, 15])
def test_unpadded_heads_are_seen(heads: int) -> None:
    """Story 5: split metadata sized from the heads there are, at each count that it hit."""
    heads_are_padded(heads)
    (fault,) = (fault for fault in GPU_FAULTS if fault.id == "split-unpadded-heads")
    with fault.seeded(), pytest.raises(CheckFailed):
        heads_are_padded(heads)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 63, 64, 100, 256, 1000])
def test_every_batch_has_a_graph_at_most_a_third_larger(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= rows * 4 / 3 or size - rows <= 7


def test_rows_and_padding_of_every_step() -> None:
    """Blocks that grow, move and shrink; what a step does not give is what padding has."""
    fixed = FixedInputs(12, 4, torch.device("cpu"))
    steps = [
        [[1]],
        [[1], [2, 3]],
        [[2, 3, 4], [1, 5]],
        [[i + 1, 50 + i] for i in range(11)],
        [[i + 2] for i in range(12)],
        [[7, 8, 9, 10]],
    ]
    for number, blocks in enumerate(steps):
        count = len(blocks)
        given = {"lengths": [number + i for i in range(count)], "seed": [number] * count}
        fixed.fill(given, blocks)
        for row, ids in enumerate(blocks):
            assert fixed.table[row, : len(ids)].tolist() == ids
        for name, (dtype, padding) in FIELDS.items():
            field = fixed.fields[name]
            assert field.dtype == dtype
            assert field[:count].tolist() == [*given.get(name, [padding] * count)]
            assert field[count:].tolist() == [padding] * (12 - count)
