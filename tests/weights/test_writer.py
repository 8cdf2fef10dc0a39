"""What `make-tiny` writes of a matrix: no number is farther from its own than half a step of its
format, so that scales, powers of two among them, leave room for the largest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trueline.tiny.quantise import quantise
from trueline.verify.cases import FP4, FP8_32, FP8_UE8M0
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.fp4 import Fp4Stored


def matrix() -> Tensor:
    """Blocks and groups whose largest numbers are at every place between two powers of two."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(4 * torch.rand(80, 6, generator=generator) - 2)
    return torch.randn(80, 192, generator=generator) * sizes.repeat_interleave(32, 1)


@pytest.mark.parametrize("fmt", [FP8_32, FP8_UE8M0, FP4.others], ids=["float32", "ue8m0", "e8m0"])
def test_block_fp8(fmt: BlockFp8) -> None:
    value = matrix()
    codes, scales = quantise(value, fmt, torch.float32)
    stored = Fp8Stored(codes, scales.float(), fmt.block)
    of_each = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)[: len(value)]
    half_step = torch.maximum(value.abs() * 2.0**-4, of_each * 2.0**-10)
    assert bool(((stored.dequantise() - value).abs() <= half_step * 1.001).all())
    if fmt.powers_of_two:
        assert bool((scales.float().frexp().mantissa == 0.5).all())


def test_fp4() -> None:
    value = matrix()
    packed, scales = quantise(value, FP4.routed, torch.float32)
    made = Fp4Stored(packed.view(torch.uint8), scales.view(torch.uint8), 192).dequantise()
    of_each = scales.float().repeat_interleave(32, 1)
    half_step = torch.maximum(value.abs() / 4, of_each / 4)
    assert bool(((made - value).abs() <= half_step * 1.001).all())
