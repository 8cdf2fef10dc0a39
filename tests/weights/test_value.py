"""Weight values: cut and concatenated anywhere, every number keeps its own scale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline.models import read_model
from trueline.spec.source import Span
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.dense import DenseStored
from trueline.weights.ledger import balance
from trueline.weights.value import StoredPart, Weight, dense, unstack

Tiny = Callable[..., Path]
BLOCK = (24, 16)
FLOAT = torch.float32


def fp8(rows: int, columns: int = 50, seed: int = 0) -> tuple[Fp8Stored, Tensor]:
    """A stored matrix whose blocks have scales far apart, and its numbers one by one."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    grid = [-(-size // block) for size, block in zip((rows, columns), BLOCK, strict=True)]
    scales = torch.rand(grid, generator=generator) * 10 ** torch.randn(grid, generator=generator)
    exact = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            scale = scales[row // BLOCK[0], column // BLOCK[1]]
            exact[row, column] = numbers[row, column].float() * scale
    return Fp8Stored(numbers, scales, BLOCK), exact


def weight(stored: Stored, dtype: torch.dtype = FLOAT, label: str = "block fp8") -> Weight:
    return Weight(stored.shape, dtype, (StoredPart(stored, label, (0, 0)),))


@pytest.mark.parametrize("axis", [0, 1])
def test_cuts_inside_of_blocks(axis: int) -> None:
    stored, exact = fp8(53, 36)
    total = stored.shape[axis]
    for start in range(total):
        for stop in range(start + 1, total + 1):
            cut = weight(stored).cut(axis, Span(start, stop, total))
            assert torch.equal(cut.dequantise(), exact.narrow(axis, start, stop - start))


def test_cuts_of_cuts() -> None:
    stored, exact = fp8(70)
    for axis, other in ((0, 0), (0, 1), (1, 1)):
        once = weight(stored).cut(axis, Span(13, 45, stored.shape[axis]))
        twice = once.cut(other, Span(9, 30, once.shape[other]))
        wanted = exact.narrow(axis, 13, 32).narrow(other, 9, 21)
        assert torch.equal(twice.dequantise(), wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_concat_where_blocks_do_not_line_up(axis: int) -> None:
    """576 rows of 128 in small: the second matrix begins in the middle of the first one's block."""
    several = [fp8(*((n, 50) if axis == 0 else (50, n)), seed=n) for n in (33, 57, 19)]
    one = Weight.concat([weight(stored) for stored, _ in several], axis)
    exact = torch.cat([numbers for _, numbers in several], axis)
    assert one.shape == exact.shape
    assert one.format == "block fp8"
    assert one.nbytes == sum(stored.nbytes for stored, _ in several)
    assert torch.equal(one.dequantise(), exact)


def stack(seed: int = 0) -> tuple[Weight, Tensor]:
    """Three experts, each a gate over an up."""
    parts, exact = [], torch.empty(3, 70, 50)
    for expert in range(3):
        for begin, rows in ((0, 30), (30, 40)):
            stored, numbers = fp8(rows, seed=seed + 10 * expert + begin)
            parts.append(StoredPart(stored, "block fp8", (expert, begin, 0)))
            exact[expert, begin : begin + rows] = numbers
    return Weight((3, 70, 50), FLOAT, tuple(parts)), exact


def test_cuts_through_several_parts() -> None:
    one, exact = stack()
    assert torch.equal(one.dequantise(), exact)
    for axis, start, stop in ((0, 1, 3), (1, 7, 61), (1, 31, 69), (1, 0, 30), (2, 15, 17)):
        cut = one.cut(axis, Span(start, stop, one.shape[axis]))
        assert torch.equal(cut.dequantise(), exact.narrow(axis, start, stop - start))
    more, numbers = stack(seed=100)
    for axis in range(3):
        both = Weight.concat((one, more), axis)
        assert torch.equal(both.dequantise(), torch.cat((exact, numbers), axis))


@pytest.mark.parametrize("fused", [False, True])
def test_stacked_matrices_one_by_one(fused: bool) -> None:
    one, exact = stack()
    if fused:
        one = Weight((3, 70, 50), FLOAT, (StoredPart(DenseStored(exact), "dense", (0, 0, 0)),))
    each = list(unstack(one))
    assert [matrix.shape for matrix in each] == [(70, 50)] * 3
    for ours, plain, wanted in zip(each, unstack(exact), exact, strict=True):
        assert torch.equal(dense(ours), wanted)
        assert torch.equal(dense(plain), wanted)


def test_a_gap_is_our_own_bug() -> None:
    stored, _ = fp8(70)
    with pytest.raises(AssertionError, match="50 numbers are not filled once"):
        Weight((71, 50), FLOAT, (StoredPart(stored, "block fp8", (0, 0)),))


def test_a_mixture_of_formats_is_dense() -> None:
    """A fused projection may have one part that the config exempts."""
    stored, exact = fp8(33)
    plain = torch.randn(20, 50)
    mixed = Weight.concat((weight(stored), weight(DenseStored(plain), label="dense")))
    assert mixed.format == "dense"
    assert torch.equal(mixed.dequantise(), torch.cat((exact, plain)))


def test_numbers_are_rounded_once() -> None:
    stored, exact = fp8(33)
    narrow = weight(stored, torch.bfloat16)
    assert torch.equal(narrow.dequantise(), exact.bfloat16())
    assert torch.equal(narrow.dequantise(FLOAT), exact)
    assert not torch.equal(exact.bfloat16().float(), exact)


def test_a_tensor_of_its_own_is_not_copied() -> None:
    numbers = torch.randn(5, 7)
    assert Weight.of(numbers).dequantise().data_ptr() == numbers.data_ptr()
    assert Weight.of(numbers).nbytes == numbers.nbytes


def test_a_weight_goes_where_it_is_sent() -> None:
    stored, _ = fp8(33)
    sent = weight(stored).to(torch.device("meta"))
    assert sent.dequantise().device.type == "meta"
    assert Weight.of(torch.ones(3)).to(torch.device("meta")).dequantise().device.type == "meta"


def test_exempt_by_published_name(tiny: Tiny, tmp_path: Path) -> None:
    """The list names modules as they are published, the file with a prefix."""
    storage = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())
    shutil.copytree(tiny("kimi_k25", storage=storage), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    exempt = {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}
    config["quantization_config"] |= exempt
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint is not None
    (wrong,) = balance(checkpoint, read_model(tmp_path)).wrong
    assert "'language_model.model.layers.0.mlp.up_proj.weight' F8_E4M3" in wrong
    assert "quantization_config exempts it by name" in wrong
