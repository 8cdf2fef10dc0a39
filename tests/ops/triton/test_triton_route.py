"""The router on a GPU, line by line on this CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trueline.ops.registry import implementation
from trueline.ops.route import triton
from trueline.verify.failed import CheckFailed
from trueline.verify.ops import OP_CHECKS, randn
from trueline.verify.ops.basic import ROUTERS

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_op(dtype: torch.dtype) -> None:
    for check in OP_CHECKS["route"]:
        check.run(implementation("route", "triton"), dtype)


def test_rounded_logits_are_seen() -> None:
    """The GEMM must have the digits of float32."""

    def choose(x: Any, packed: Any, *rest: Any) -> Any:
        return triton.choose(x, packed[:1].half(), *rest)

    broken = SimpleNamespace(run=triton.run, pack=triton.pack, choose=choose)
    with pytest.raises(CheckFailed, match="route from tokens"):
        OP_CHECKS["route"][0].run(broken, torch.float16)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("bad", ["some", "all"])
def test_nan_chooses_something(router: Any, bad: str) -> None:
    logits, bias = randn(2, 12), randn(12, seed=1)
    logits[:, slice(None) if bad == "all" else slice(2, 7)] = torch.nan
    ids, _ = triton.run(logits, bias, router)
    assert all(len(set(row)) == router.top_k and set(row) <= set(range(12)) for row in ids.tolist())


def test_the_weight_is_kept_whole() -> None:
    weight = randn(5, 7)
    for exact, parts in ((weight, 3), (weight.bfloat16().float(), 1)):
        packed = triton.pack(exact, torch.bfloat16, None)
        assert packed.shape == (parts, 5, 7)
        assert torch.equal(packed.double().sum(0).float(), exact)
    small = triton.pack(weight * 1e-6, torch.float16, None)  # float16 has no room for what is left
    assert torch.equal(small, (weight * 1e-6)[None])


def test_products_are_split_for_few_tokens_only() -> None:
    def splits(tokens: int) -> int:
        how = triton.launch(tokens, 256, 2048, torch.bfloat16, 132)
        return -(-2048 // how.depth)

    assert [splits(n) for n in (1, 64, 256, 8192)] == [16, 16, 4, 1]
