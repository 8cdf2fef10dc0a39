"""Norms, rotation and what is fused with them in Triton, run by the interpreter."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from trueline.ops.capabilities import Context
from trueline.ops.hyper_connections import kernels
from trueline.ops.hyper_connections import triton as hyper_connections
from trueline.ops.registry import capabilities, implementation
from trueline.ops.rms_norm import reference as norm_reference
from trueline.ops.rms_norm import triton as rms_norm
from trueline.verify.bounds import norm_bound
from trueline.verify.ops import OP_CHECKS, randn
from trueline.verify.ops import hyper_connections as verify
from trueline.verify.ops.data import close

OPS = (
    *("rms_norm", "rope", "latent_write", "qkv_prepare", "gated_norm", "hyper_connections"),
    "sink_prepare",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_checks(op: str, dtype: torch.dtype) -> None:
    for check in (each for each in OP_CHECKS[op] if not each.invariant):
        given = (dtype,) if "dtype" in signature(check.run).parameters else ()
        check.run(implementation(op, "triton"), *given)


@pytest.mark.parametrize("op", OPS)
def test_bits_of_a_row_may_depend_on_the_batch(op: str) -> None:
    invariant = Context(dtype=torch.float32, batch_invariant=True)
    assert capabilities(op, "triton").refusals(invariant)


def test_wide_rows_go_in_one_pass() -> None:
    x, weight = randn(3, 5000), randn(5000, seed=1)
    exact = norm_reference.run(x.double(), weight.double(), 1e-6)
    close("rms_norm, wide", rms_norm.run(x, weight, 1e-6), exact, norm_bound(5000))
    launch = rms_norm.launch(5000)
    assert (launch.rows, launch.warps) == (1, 16)
    assert rms_norm.launch(128).rows == 8


def test_many_dims() -> None:
    x, weight = randn(2, 3, 4, 10)[..., 1:8], randn(7, seed=1)
    exact = norm_reference.run(x.double(), weight.double(), 1e-6)
    close("rms_norm, four dims", rms_norm.run(x, weight, 1e-6), exact, norm_bound(7))
    one = rms_norm.run(x[0, 0, 0], weight, 1e-6)
    close("rms_norm, one dim", one[None], exact[0, 0, 0][None], norm_bound(7))


def test_a_mix_of_few_tokens_is_split() -> None:
    """Over as many programs as run at a time, each with channels of its own."""
    for tokens, width, splits in (
        *((1, 4096, 128), (16, 4096, 128), (64, 4096, 64), (256, 4096, 16), (1024, 4096, 4)),
        *((1025, 4096, 8), (1, 37, 2), (1, 32, 1), (1 << 14, 4096, 1), (1, 7168, 112)),
    ):
        how = hyper_connections.launch(tokens, width, 132)
        assert how.splits == splits
        assert (how.splits - 1) * how.depth < width <= how.splits * how.depth


def test_a_program_has_several_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_connections, "num_sms", lambda _: 1)
    verify.hyper_connections(hyper_connections, torch.float16)


def test_weights_in_two_parts_keep_their_digits() -> None:
    """Tensor cores read ten bits after the first: of h there are no more, fn is in two parts. The
    interpreter multiplies whole numbers, so here is what a GPU would."""
    b = randn(20000, seed=3)
    half, bits = kernels._TF32_HALF.value, kernels._TF32_BITS.value
    high = ((b.view(torch.int32) + half) & bits).view(torch.float32)
    low = ((b - high).view(torch.int32) & bits).view(torch.float32)
    assert torch.equal(high.view(torch.int32) & ~bits, torch.zeros_like(b, dtype=torch.int32))
    assert ((high.double() + low.double() - b.double()).abs() <= 2.0**-22 * b.abs()).all()
    exact = randn(64, seed=4)
    for narrow in (exact.half(), exact.bfloat16()):
        assert not (narrow.float().view(torch.int32) & ~bits).any()
