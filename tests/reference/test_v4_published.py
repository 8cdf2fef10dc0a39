"""Numerics `published` of the reference: what DeepSeek V4's own inference code rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_numerics import nearest as nearest_e4m3
from torch import Tensor

from hf_v4 import ALL, SLIDING, SPARSE, VOCAB, V4Case, V4Checkpoint
from trueline import reference
from trueline.errors import ConfigError
from trueline.reference import published

Checkpoints = Callable[[V4Case], V4Checkpoint]

CASE = V4Case(
    "published",
    layers=(SLIDING, SPARSE, ALL),
    keys={"head_dim": 150, "qk_rope_head_dim": 14, "index_head_dim": 64},
)
TOKENS = torch.randint(VOCAB, (47,), generator=torch.Generator().manual_seed(4))
HERE = published.Published()  # its weights play no part in what is rounded
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def next_power(x: float) -> float:
    power = 2.0 ** math.floor(math.log2(x))
    return power if power >= x else 2 * power


def bfloat16(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).bfloat16())


def slow_key(row: list[float], rotated: int) -> list[float]:
    row = [bfloat16(x) for x in row]
    plain = len(row) - rotated
    found: list[float] = []
    for start in range(0, plain, 64):
        group = row[start : min(start + 64, plain)]
        scale = next_power(max([abs(x) for x in group] + [1e-4]) / 448)
        found += [nearest_e4m3(x / scale) * scale for x in group]
    return found + row[plain:]


def slow_e2m1(row: list[float]) -> list[float]:
    found: list[float] = []
    for start in range(0, len(row), 32):
        group = row[start : start + 32]
        scale = next_power(max([abs(x) for x in group] + [6 * 2.0**-126]) / 6)
        for x in group:
            code = min(range(8), key=lambda c: (abs(E2M1[c] - abs(x) / scale), c % 2))
            found.append(math.copysign(E2M1[code] * scale, x))
    return found


def slow_index(row: list[float]) -> list[float]:
    row = [bfloat16(x) for x in row]
    size = len(row)
    return slow_e2m1(
        [
            bfloat16(sum(x * (-1) ** (i & j).bit_count() for i, x in enumerate(row)) * size**-0.5)
            for j in range(size)
        ]
    )


def rows(width: int) -> Tensor:
    """Unequal groups, the last one partial; zeros; a needle; largest numbers at powers of two."""
    x = torch.randn(9, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1] *= torch.logspace(-9, 9, width, base=2.0, dtype=torch.float64)
    x[2, 7], x[3, :40], x[4] = 4096.0, 0.0, 0.0
    x[5] *= 1e-7
    for row, largest in ((6, 1.75), (7, 3.0), (8, 448.0)):
        x[row] = x[row] / x[row].abs().max() * largest
    return x


@pytest.mark.parametrize("width", [15, 78, 79, 150])
def test_stored_keys_by_their_definition(width: int) -> None:
    x = rows(width)
    exact = torch.tensor([slow_key(row, 14) for row in x.tolist()], dtype=torch.float64)
    assert torch.equal(published.stored_key(HERE, x, 14), exact)


def test_stored_keys_fit_bfloat16() -> None:
    found = published.stored_key(HERE, rows(150), 14)
    assert torch.equal(found, found.bfloat16().double())
    short = published.stored_key(HERE, rows(150).bfloat16(), 14)
    assert torch.equal(short.double(), found)


@pytest.mark.parametrize("width", [16, 64, 128])
def test_index_rows_by_their_definition(width: int) -> None:
    x = rows(max(width, 41))[:, :width]
    exact = torch.tensor([slow_index(row) for row in x.tolist()], dtype=torch.float64)
    assert torch.equal(published.index_row(HERE, x), exact)


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    group = torch.tensor([6.0, *middles, *(-x for x in middles)], dtype=torch.float64)
    assert published.through_e2m1(group)[1:8].tolist() == wanted
    assert published.through_e2m1(group)[8:].tolist() == [-x for x in wanted]
    for side in (-1, 1):
        off = group * (1 + side * 2.0**-40)
        off[0] = 6.0
        step = [published.E2M1.index(x) for x in published.through_e2m1(off)[1:8].tolist()]
        assert step == list(range(7) if side < 0 else range(1, 8))
    # a scale that is a power of two already, and one unit more
    assert published.through_e2m1(torch.tensor([6.0, 1.5]))[1] == 1.5
    assert published.through_e2m1(torch.tensor([6.0 * (1 + 2.0**-22), 1.5]))[1] == 2.0


def test_hadamard_is_orthogonal_and_keeps_products() -> None:
    matrix = published.hadamard(128)
    assert torch.equal(matrix @ matrix.T, 128 * torch.eye(128))
    with pytest.raises(ConfigError, match="index_head_dim=22"):
        published.hadamard(22)


def test_what_it_rounds_and_what_not(
    v4_checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = v4_checkpoints(CASE).path
    plain, rounded = reference.load(path), reference.load(path, numerics="published")
    made: dict[int, Tensor] = {}
    exact = plain.logits(TOKENS, selected=made)
    other: dict[int, Tensor] = {}
    assert (rounded.logits(TOKENS, selected=other) - exact).abs().max() > 1e-3
    assert other[1].shape == made[1].shape
    assert (other[1].sort(1).values != made[1].sort(1).values).any()
    # index rows choose, and do nothing else; the rest are keys, once a layer and for entries
    counts: list[tuple[int, ...]] = []

    def exact_key(params: object, row: Tensor, rotated: int) -> Tensor:
        counts.append(tuple(row.shape))
        return row

    monkeypatch.setattr(published, "stored_key", exact_key)
    assert torch.equal(rounded.logits(TOKENS, forced=made), exact)
    assert counts == [(47, 150), (47, 150), (15, 150), (47, 150), (9, 150)]
    monkeypatch.setattr(published, "index_row", lambda params, row: row)
    assert torch.equal(rounded.logits(TOKENS), exact)


def test_only_v4_has_them(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="'published' of deepseek_v3"):
        reference.load(tiny("deepseek_v3"), numerics="published")
