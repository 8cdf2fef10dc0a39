"""Numerics `activations` of the reference: what fp8 makes of the inputs of quantised modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline import reference
from trueline.errors import ConfigError
from trueline.reference import functional
from trueline.verify.cases import FP4, FP8_32, INT4
from trueline.weights.formats import Storage

Tiny = Callable[..., Path]
# What groups of 32 divide; of 128, the last one is partial.
SIZES = {"hidden_size": 160, "moe_intermediate_size": 64, "intermediate_size": 192}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
E4M3 = sorted(
    {
        (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    }
)


def nearest(x: float) -> float:
    """Of two numbers equally near, the one whose last bit is zero."""
    return math.copysign(min(E4M3, key=lambda code: (abs(code - abs(x)), E4M3.index(code) % 2)), x)


def slowly(row: list[float], powers_of_two: bool) -> list[float]:
    found: list[float] = []
    for start in range(0, len(row), 128):
        group = row[start : start + 128]
        scale = max([abs(x) for x in group] + [1e-4]) / 448
        if powers_of_two:
            power = 2.0 ** math.floor(math.log2(scale))
            while power < scale:
                power *= 2
            scale = power
        found += [nearest(x / scale) * scale for x in group]
    return found


def rows() -> Tensor:
    """Unequal groups, one of them partial; a needle; zeros; largest numbers at powers of two and
    next to them, and at the floor and next to it."""
    x = torch.randn(12, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1] *= torch.logspace(-6, 6, 300, base=2.0, dtype=torch.float64)
    x[2, 77] = 4096.0
    x[3, :128] = 0
    x[4] = 0
    for row, largest in enumerate((1.75, 3.5, 1e-4, 448 * 2.0**-9), start=5):
        x[row] = x[row] / x[row].abs().max() * largest
        x[row, 130] = largest
    # a scale that is a power of two already: a larger one loses the smallest numbers
    x[8, 131:256] = torch.logspace(-11, 1, 125, base=2.0, dtype=torch.float64) * 2.0**-9
    x[9, :] *= 1e-7
    x[10, 5], x[11, 5] = 448 * (1 + 2.0**-50), 448 * (1 - 2.0**-50)
    return x


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_through_fp8_by_its_definition(powers_of_two: bool) -> None:
    x = rows()
    exact = torch.tensor([slowly(row, powers_of_two) for row in x.tolist()], dtype=torch.float64)
    assert torch.equal(functional.through_fp8(x, powers_of_two), exact)


@pytest.mark.parametrize("storage", [FP8_32, FP4], ids=["block fp8", "fp4"])
def test_inputs_of_quantised_modules_and_of_no_others(
    storage: Storage, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("deepseek_v3", keys=SIZES, storage=storage)
    plain = reference.load(path)
    rounded = reference.load(path, numerics="activations")
    params = rounded.params
    assert isinstance(params, functional.Fp8Inputs)
    assert "model.layers.0.self_attn.o_proj" in params.modules
    assert not {"lm_head", "model.layers.1.mlp.gate"} & params.modules
    assert (rounded.logprobs(TOKENS) - plain.logprobs(TOKENS)).abs().max() > 1e-4
    asked: list[bool] = []

    def exact(x: Tensor, powers_of_two: bool) -> Tensor:
        asked.append(powers_of_two)
        return x

    monkeypatch.setattr(functional, "through_fp8", exact)
    assert torch.equal(rounded.logits(TOKENS), plain.logits(TOKENS))
    assert set(asked) == {storage is FP4}


def test_no_quantised_module_no_difference(tiny: Tiny) -> None:
    path = tiny("kimi_k2", keys=SIZES, storage=INT4)  # activations of int4 stay as they are
    plain, rounded = reference.load(path), reference.load(path, numerics="activations")
    assert torch.equal(rounded.logits(TOKENS), plain.logits(TOKENS))


def test_unknown_numerics(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="'weights', 'activations'"):
        reference.load(tiny("deepseek_v3"), numerics="fp8")
