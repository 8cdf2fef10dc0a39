"""Every op against its float64 reference, on data that hides nothing: the checks of verify/ops, for
every implementation of ours; and what is particular to one of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline.ops import rope, steady
from trueline.ops.experts import cpu as experts_cpu
from trueline.ops.mla_decode import cpu as decode_cpu
from trueline.ops.mla_prefill import HeadWeights, cheaper_form
from trueline.ops.registry import (
    FUNCTIONS,
    GPU_NAMES,
    INVARIANT_ONLY,
    OPS,
    implementation,
    refusals,
)
from trueline.plan.select import bits_are_steady
from trueline.verify.bounds import softmax
from trueline.verify.ops import OP_CHECKS, OpCheck, randn
from trueline.verify.ops.data import within

ALL = [
    pytest.param(
        op,
        name,
        check,
        id=f"{op} {name} {check.what}",
        marks=[pytest.mark.slow] if (name, check.what) == ("cpu", "real dims") else [],
    )
    for op, names in OPS.items()
    for name in names
    for check in OP_CHECKS[op]
    if name != "reference" and name not in GPU_NAMES  # those: test_triton_*.py, test_gpu.py
]


@pytest.mark.parametrize(("op", "name", "check"), ALL)
def test_op(op: str, name: str, check: OpCheck) -> None:
    refused = refusals(op, name, torch.float32, batch_invariant=check.invariant)
    if refused:
        pytest.skip(f"refused here: {refused}")
    check.run(implementation(op, name))


@pytest.mark.parametrize(
    "op",
    [
        *(pytest.param(op, marks=pytest.mark.slow) for op in ("lightning", "mla_decode")),
        "sampling",
        "route",
    ],
)
def test_references_pass_too(op: str) -> None:
    """Or the checks would ask for more than the contract."""
    for check in OP_CHECKS[op]:
        check.run(implementation(op, "reference"))


def test_every_op_has_a_reference_and_checks() -> None:
    names = {path.name for path in (Path(rope.__file__).parent.parent).iterdir() if path.is_dir()}
    assert names - {"__pycache__"} == set(OPS) == set(FUNCTIONS) == set(OP_CHECKS)
    for op, implementations in OPS.items():
        assert [name for name in implementations if name not in GPU_NAMES][-1] == "reference"
        for name in implementations:
            module = importlib.import_module(f"trueline.ops.{op}.{name}")
            spared = INVARIANT_ONLY.get(op, ()) if name in GPU_NAMES else ()
            needed = set(FUNCTIONS[op]) - set(spared)
            assert all(hasattr(module, function) for function in needed)


def test_the_probe_of_bits_can_fail() -> None:
    class Plain:
        pack = staticmethod(lambda weight: weight)
        run = staticmethod(lambda x, weight: torch.nn.functional.linear(x, weight) + len(x) * 1e-7)

    assert not bits_are_steady(Plain, torch.float32)


@pytest.mark.parametrize("cut", [1, 7, 64, 129])
def test_halves_merge_to_the_whole(cut: int) -> None:
    scores, values = 3 * randn(2, 6, 130), randn(2, 130, 11, seed=1)
    whole = decode_cpu.softmax_part(scores.clone(), values)
    parts = [
        decode_cpu.softmax_part(scores[..., s].clone(), values[:, s])
        for s in (slice(cut), slice(cut, None))
    ]
    out, lse = decode_cpu.merge(*parts)
    each = [softmax(*map(Tensor.double, (one, torch.zeros_like(one), value)))
            for one, value in zip(scores, values, strict=True)]  # fmt: skip
    for made, wanted, limit in ((out, whole[0], 0), (lse[..., None], whole[1][..., None], 1)):
        # both are float32
        within(
            "mla_decode, merged", made, wanted, 2 * torch.stack([e[limit] for e in each])[..., None]
        )
    empty = decode_cpu.softmax_part(torch.full((2, 6, 4), float("-inf")), values[:, :4])
    for merged in (decode_cpu.merge(whole, empty), decode_cpu.merge(empty, whole)):
        assert torch.equal(merged[0], whole[0])
        assert torch.equal(merged[1], whole[1])


def test_the_cheaper_form() -> None:
    heads = HeadWeights(torch.empty(16, 512, 128), torch.empty(16, 128, 512))
    assert cheaper_form(heads, 64, 2048, 2048) == "expanded"
    assert cheaper_form(heads, 64, 4, 2048) == "absorbed"


def test_each_expert_is_read_once() -> None:
    calls: list[int] = []

    class Counting:
        pack = staticmethod(lambda weight: weight)

        @staticmethod
        def run(x: Tensor, weight: Tensor) -> Tensor:
            calls.append(id(weight))
            return x @ weight.T

    packed = experts_cpu.pack(randn(6, 8, 5), randn(6, 5, 4), Counting)
    ids = torch.tensor([[0, 3], [3, 0], [0, 5], [3, 5]])
    experts_cpu.run(randn(4, 5), ids, torch.ones(4, 2), packed, Counting)
    assert len(calls) == len(set(calls)) == 6  # three active experts, two products each


# -- steady elementwise functions -------------------------------------------------------


@pytest.mark.parametrize("function", [steady.sigmoid, steady.silu, steady.exp])
@pytest.mark.parametrize("width", [1, 5, 12, 64, 384])
def test_elementwise_bits_do_not_depend_on_neighbours(function: Any, width: int) -> None:
    x = randn(700, width)
    whole = function(x)
    for part in (slice(0, 1), slice(3, 5), slice(7, 40), slice(13, 699)):
        assert torch.equal(function(x[part]), whole[part])


@pytest.mark.parametrize("function", [steady.sigmoid, steady.silu, steady.exp, steady.log])
@pytest.mark.parametrize("width", [12, 60, 120, 384, 1000])
def test_elementwise_bits_do_not_depend_on_the_width(function: Any, width: int) -> None:
    """A rank has some of the channels, in a tensor of their own or beside others."""
    x = randn(9, 2 * width).abs() + 1e-3
    whole = function(x)
    for size in (2, 4, 12):
        for start in range(0, 2 * width, 2 * width // size):
            part = slice(start, start + 2 * width // size)
            assert torch.equal(function(x[:, part]), whole[:, part])
            assert torch.equal(function(x[:, part].clone()), whole[:, part])
            assert function(x[:, part]).is_contiguous()
    assert torch.equal(function(x.T.contiguous().T), whole)
    assert function(x[:0]).shape == (0, 2 * width)
