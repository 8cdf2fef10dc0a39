"""Every op against its float64 reference, on data that hides nothing: the checks of verify/ops, for
every implementation of ours; and what is particular to one of them."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline import device
from trueline.cache.layout import LatentFp8, LatentLayout
from trueline.ops import invariant_math, rope
from trueline.ops.capabilities import CPU, GPU, Context, HeadDims
from trueline.ops.experts import cpu as experts_cpu
from trueline.ops.mla_decode import cpu as decode_cpu
from trueline.ops.mla_prefill import cheaper_form
from trueline.ops.registry import FUNCTIONS, OPS, capabilities, implementation, needed, refusals
from trueline.plan.select import is_batch_invariant
from trueline.verify.bounds import softmax
from trueline.verify.ops import FP8_CHECKS, OP_CHECKS, OpCheck, attention, latent_fp8, randn
from trueline.verify.ops.data import within
from trueline.verify.suite.ops import left_to_a_library

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
    if name != "reference"
    and "cpu" in capabilities(op, name).devices  # others: test_triton_*.py, test_gpu.py
    and "weights" in capabilities(op, name).numerics  # others: WITH_FP8_INPUTS
]


@pytest.mark.parametrize(("op", "name", "check"), ALL)
def test_op(op: str, name: str, check: OpCheck) -> None:
    context = Context(dtype=torch.float32, batch_invariant=check.invariant)
    refused = refusals(op, name, context) or left_to_a_library(op, name, check)
    if refused:
        pytest.skip(f"refused here: {refused}")
    given = Given(op, name)
    check.run(given.implementation)
    if not check.invariant and check.what in NUMBERS:
        for parameter, numbers in given.seen.items():
            assert len(numbers) > 1, (
                f"{parameter} is {numbers} in every case: a constant would pass"
            )


NUMBERS = ("numbers", "clamped", "any decay")


class Given:
    """An implementation, and which numbers it is given beside its tensors."""

    def __init__(self, op: str, name: str) -> None:
        self.seen: dict[str, set[float]] = {}
        right = implementation(op, name)
        functions = {
            each: self._told(getattr(right, each)) for each in needed(op, right.capabilities)
        }
        self.implementation: Any = SimpleNamespace(capabilities=right.capabilities, **functions)

    def _told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            for parameter, number in signature.bind(*args, **kwargs).arguments.items():
                if isinstance(number, float):
                    self.seen.setdefault(f"{function.__name__}'s {parameter}", set()).add(number)
            return function(*args, **kwargs)

        return run


# Scores in float32: GEMMs of 16-bit numbers on a CPU give 16-bit results. And what has a branch of
# its own for 16 bits, or leaves it to another op.
IN_16_BITS = [
    *(("mla_decode", "cpu", what) for what in ("numbers", "fp8")),
    ("mla_prefill", "cpu", "near ties"),
    *(
        (op, name, check.what)
        for op, name, check in (case.values for case in ALL)
        if isinstance(check, OpCheck) and check.what in NUMBERS
        if op not in ("linear", "mla_decode", "mla_prefill", "lightning")
        if torch.bfloat16 in (capabilities(op, name).dtypes or (torch.bfloat16,))
    ),
]


@pytest.mark.parametrize(("op", "name", "what"), IN_16_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, op: str, name: str, what: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "SHAPES", ((3, 19), (64, 5)))
    monkeypatch.setattr(latent_fp8, "BLOCK_SIZES", (3,))
    if refused := refusals(op, name, Context(dtype=dtype)):
        pytest.skip(f"refused here: {refused}")
    check = next(check for check in OP_CHECKS[op] if check.what == what)
    check.run(implementation(op, name), dtype)


WITH_FP8_INPUTS = [
    pytest.param(op, name, check, id=f"{op} {name} {check.what}")
    for op, checks in FP8_CHECKS.items()
    for name in OPS[op]
    for check in checks
    if "activations" in capabilities(op, name).numerics and "cpu" in capabilities(op, name).devices
]


@pytest.mark.parametrize(("op", "name", "check"), WITH_FP8_INPUTS)
def test_op_with_fp8_inputs(op: str, name: str, check: OpCheck) -> None:
    check.run(implementation(op, name))


OF_REFERENCES = [
    pytest.param(
        op,
        check,
        id=f"{op} {check.what}",
        # the first of an op has all of its functions, and sampling's others are fast
        marks=[] if check == checks[0] or op == "sampling" else [pytest.mark.slow],
    )
    for op, checks in OP_CHECKS.items()
    if op != "index_scores"  # whose reference keeps the digits of float64
    for check in checks
]


@pytest.mark.parametrize(("op", "check"), OF_REFERENCES)
def test_references_pass_too(op: str, check: OpCheck) -> None:
    """Or the checks would ask for more than the contract. And what other implementations are
    compared with leaves out some of what a reference does where it is chosen by name."""
    check.run(implementation(op, "reference"))


def test_every_op_has_a_reference_and_checks() -> None:
    names = {path.name for path in (Path(rope.__file__).parent.parent).iterdir() if path.is_dir()}
    assert names - {"__pycache__"} == set(OPS) == set(FUNCTIONS) == set(OP_CHECKS)
    for op, implementations in OPS.items():
        on_cpu = [name for name in implementations if "cpu" in capabilities(op, name).devices]
        assert on_cpu[-1] == "reference"
        for name in implementations:
            module = importlib.import_module(f"trueline.ops.{op}.{name}")
            assert module.capabilities is capabilities(op, name)
            functions = needed(op, module.capabilities)
            assert all(callable(getattr(module, function)) for function in functions)


def test_functions_come_from_the_protocols() -> None:
    assert FUNCTIONS["linear"] == ("pack", "run", "run_wide")
    assert FUNCTIONS["lightning"] == ("prepare", "decode", "prepare_prefill", "prefill")
    assert needed("mlp", CPU) == ("pack", "run", "middle", "down")
    assert needed("mlp", GPU) == ("pack", "run")
    assert needed("sampling", GPU) == ("sample", "score", "draw")


def test_what_is_for_a_gpu_is_known_without_its_libraries() -> None:
    code = (
        "import sys\nsys.modules['triton'] = None  # importing it now raises\n"
        "import torch\nfrom trueline.ops.capabilities import Context\n"
        "from trueline.ops.registry import OPS, refusals\n"
        "here, there = Context(dtype=torch.float32), Context(dtype=torch.float32, device='cuda')\n"
        "for op, names in OPS.items():\n"
        "    for name in names:\n        refusals(op, name, here), refusals(op, name, there)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


HEADS, LAYOUT = HeadDims(128, 128, 128), LatentLayout(512, 64, 64)
FP8_LAYOUT, FNUZ_LAYOUT, FINE_LAYOUT = (
    replace(LAYOUT, fp8=LatentFp8(storage, "bfloat16", group))
    for storage, group in (("e4m3fn", 128), ("e4m3fnuz", 128), ("e4m3fn", 16))
)
HOPPER = Context(
    dtype=torch.bfloat16, device="cuda", compute_capability=(9, 0), heads=HEADS, latent=LAYOUT
)


@pytest.mark.parametrize(
    ("op", "changes", "why"),
    [
        ("mla_decode", {}, None),
        ("sparse_mla", {}, None),
        ("mla_prefill", {}, None),
        ("mla_decode", {"compute_capability": (8, 0)}, "needs compute capability 9.0"),
        ("mla_prefill", {"compute_capability": (10, 0)}, "needs compute capability 9.0"),
        ("mla_prefill", {"compute_capability": None}, "needs compute capability 9.0"),
        ("mla_decode", {"dtype": torch.float32}, "torch.float32 is not float16 or bfloat16"),
        ("mla_decode", {"device": "cpu"}, "runs on cuda"),
        ("mla_decode", {"heads": HeadDims(32, 128, 128)}, "with 32, half or more is padding"),
        ("mla_decode", {"latent": LatentLayout(256, 64, 64)}, "512 + 64 numbers, not 256 + 64"),
        ("sparse_mla", {"latent": LatentLayout(512, 32, 64)}, "512 + 64 numbers, not 512 + 32"),
        ("mla_decode", {"latent": FP8_LAYOUT}, "reads latents as they are computed, not e4m3fn"),
        ("sparse_mla", {"latent": FP8_LAYOUT}, "reads latents as they are computed, not e4m3fn"),
        ("mla_prefill", {"latent": FP8_LAYOUT}, None),
        ("mla_prefill", {"latent": FNUZ_LAYOUT}, "e4m3fnuz is no number format of this device"),
        ("mla_prefill", {"heads": HeadDims(8, 192, 128)}, "from 64 on, not 192 + 64 and 128"),
        ("mla_prefill", {"heads": HeadDims(8, 32, 128)}, "from 64 on, not 32 + 64 and 128"),
        ("mla_prefill", {"heads": HeadDims(8, 256, 128)}, "bytes of shared memory"),
    ],
)
def test_what_the_kernels_for_hopper_need(
    op: str, changes: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "interpreting", lambda: False)
    told = refusals(op, "hopper", replace(HOPPER, **changes))
    assert told == [] if why is None else why in told[0]


@pytest.mark.parametrize("op", ["latent_write", "mla_decode", "mla_prefill", "sparse_mla"])
def test_which_fp8_latents_a_gpu_reads(op: str) -> None:
    assert not refusals(op, "triton", replace(HOPPER, latent=FP8_LAYOUT))
    assert "e4m3fn is" in refusals(op, "triton", replace(HOPPER, latent=FNUZ_LAYOUT))[0]
    assert (
        "16 scales of a latent, not 32"
        in (refusals(op, "triton", replace(HOPPER, latent=FINE_LAYOUT))[0])
    )


def test_the_probe_of_bits_can_fail() -> None:
    class Plain:
        pack = staticmethod(lambda weight: weight)
        run = staticmethod(lambda x, weight: torch.nn.functional.linear(x, weight) + len(x) * 1e-7)

    assert not is_batch_invariant(Plain, torch.float32)


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
    heads, layout = HeadDims(16, 128, 128), LatentLayout(512, 64, 16)
    assert cheaper_form(heads, layout, 2048, 2048) == "expanded"
    assert cheaper_form(heads, layout, 4, 2048) == "absorbed"


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
    assert len(calls) == len(set(calls)) == 6  # three active experts, two GEMMs each


# -- batch-invariant elementwise functions -------------------------------------------------------


@pytest.mark.parametrize(
    "function", [invariant_math.sigmoid, invariant_math.silu, invariant_math.exp]
)
@pytest.mark.parametrize("width", [1, 5, 12, 64, 384])
def test_elementwise_bits_do_not_depend_on_neighbours(function: Any, width: int) -> None:
    x = randn(700, width)
    whole = function(x)
    for part in (slice(0, 1), slice(3, 5), slice(7, 40), slice(13, 699)):
        assert torch.equal(function(x[part]), whole[part])


@pytest.mark.parametrize(
    "function",
    [invariant_math.sigmoid, invariant_math.silu, invariant_math.exp, invariant_math.log],
)
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
