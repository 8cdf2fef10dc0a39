"""Sampling by Triton's kernels, interpreted where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from trueline.ops.sampling import build_rows, cpu, kernels, reference
from trueline.ops.sampling import triton as op
from trueline.verify.ops import OP_CHECKS, OpCheck
from trueline.verify.ops.sampling import GATE, hard_logits, row, same
from trueline.verify.ops.sampling import draw as checked_draw

DTYPES = (torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", OP_CHECKS["sampling"], ids=lambda check: check.what)
def test_against_the_definition(check: OpCheck, dtype: torch.dtype) -> None:
    check.run(op, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    """Logits of a padded vocabulary, and every other row of a buffer."""
    wide = hard_logits(12, 1400, 3).clamp(-200, 200).to(dtype)
    wide[:, 1303:] = math.nan  # what is outside is not ours
    wide[1::2] = math.nan
    view = wide[::2, :1303]
    rows = [
        row(temperature=0, logprobs=3),
        row(temperature=0.8, logprobs=0),
        row(temperature=1.3, min_p=0.02, seed=3),
        row(temperature=1e-6, seed=-(2**63)),
        row(temperature=0.8, top_p=0.9, logprobs=3),
        row(temperature=0, logit_bias={3: 1.0}),
    ]
    column_major = view.T.contiguous().T
    for logits in (view, column_major):
        same(checked_draw(op, logits, rows), checked_draw(reference, view, rows), tolerance=GATE)
    assert not checked_draw(op, view, rows).bad.any()


@pytest.mark.parametrize(
    "how",
    [op.SamplingLaunch(64, 64, 4), op.SamplingLaunch(256, 64, 4), op.SamplingLaunch(128, 32, 4)],
)
def test_any_cut_gives_the_same_tokens(how: op.SamplingLaunch) -> None:
    """Ties across chunks, bad rows in any of them, a last chunk that is not full."""
    logits = hard_logits(9, 500, 4)
    logits[1] = 0.0
    logits[2, [70, 130, 499]] = 1e4  # equal, in three chunks
    logits[3, 499], logits[4, 300], logits[5] = math.nan, math.inf, -math.inf
    logits[6, :498] = -math.inf
    states = [row(temperature=0.9 * (i % 2), seed=i) for i in range(9)]
    for shift in (0, 1):
        rows = build_rows([states[(i + shift) % 9] for i in range(9)])
        wanted = cpu.sample(logits, rows)
        given = (rows.temperature, rows.seed, rows.position)
        tokens, bad = op.draw(logits, *given, how=how)
        assert torch.equal(tokens, wanted.tokens)
        assert torch.equal(bad, wanted.bad)
    cold = cpu.sample(logits, build_rows([row(temperature=0)] * 9))
    assert torch.equal(op.draw(logits, how=how)[0], cold.tokens)


def test_noise_is_the_written_function() -> None:
    """The counters' ends, and enough draws that every token comes up."""
    ends = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]
    for position in (0, 1, 4095, 2**40):
        seed, at = torch.tensor(ends), torch.full((len(ends),), position)
        logits, warm = torch.zeros(len(ends), 40), torch.ones(len(ends), dtype=torch.float64)
        tokens, _ = op.draw(logits, warm, seed, at)
        wanted = [max(range(40), key=lambda t: reference.noise(s, position, t)) for s in ends]
        assert tokens.tolist() == wanted


@triton.jit
def near_noise(bits, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, kernels.near_noise(tl.load(bits + at).to(tl.uint64, bitcast=True)))


def test_noise_in_float32_is_near_enough() -> None:
    """Both ends, and all between them: what is ruled out could not have won."""
    ends = [n << 12 for n in (0, 1, 2, 3, 100, 2**20, 2**40, 2**44 - 1, 2**44, 2**51 - 1, 2**51)]
    bits = torch.randint(0, 2**63 - 1, (1024,), generator=torch.Generator().manual_seed(1))
    bits[: len(ends)] = torch.tensor([n - 2**64 if n >= 2**63 else n for n in ends])
    bits[512:] = ~bits[:512]
    near = torch.empty(1024)
    near_noise[(1,)](bits, near, N=1024)
    exact = [
        -math.log(-math.log((2 * (number % 2**64 >> 12) + 1) / 2**53)) for number in bits.tolist()
    ]
    off = (near.double() - torch.tensor(exact, dtype=torch.float64)).abs()
    assert float(off.max()) < kernels._MARGIN.value / 4
    assert kernels._HOPELESS.value + max(exact) < min(exact)


def test_near_ties_are_settled_in_float64() -> None:
    """Two tokens whose scores differ by 1e-9, in one tile, in two, and in one lane of two."""
    how = op.SamplingLaunch(64, 16, 4)
    for a, b in ((3, 7), (3, 20), (3, 19), (60, 61), (10, 70)):
        noise = [reference.noise(5, 9, token) for token in (a, b)]
        for gap, winner in ((1e-9, a), (-1e-9, b)):
            logits = torch.full((1, 90), -50.0, dtype=torch.float64)
            logits[0, a], logits[0, b] = gap - noise[0], -noise[1]
            given = (torch.ones(1).double(), torch.tensor([5]), torch.tensor([9]))
            assert op.draw(logits, *given, how=how)[0].tolist() == [winner]


def test_min_p_filters() -> None:
    """Tokens that are just likely enough come up, others never."""
    p = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.05, 0.05], dtype=torch.float64)
    for temperature, min_p, kept in ((1.0, 0.49, 3), (1.0, 0.51, 1), (2.0, 0.45, 4)):
        states = [row(seed=s, temperature=temperature, min_p=min_p) for s in range(30)]
        tokens = checked_draw(op, p.log().expand(30, -1), states).tokens
        assert set(tokens.tolist()) == set(range(kept))


def test_the_edge_of_min_p_is_exact() -> None:
    """A token that would win if it stays: just inside and just outside, in the likeliest's chunk
    and in one of its own."""
    warm, cutoff = torch.tensor([0.5], dtype=torch.float64), math.log(0.3)
    for other in (9, 40):
        seed = next(s for s in range(99) if reference.noise(s, 1, other) + cutoff > 1 +
                    reference.noise(s, 1, 2))  # fmt: skip
        for gap, winner in ((1e-6, other), (-1e-6, 2)):
            logits = torch.full((1, 50), -90.0, dtype=torch.float64)
            logits[0, 2], logits[0, other] = 0.0, (cutoff + gap) * 0.5
            given = (
                torch.tensor([seed]),
                torch.tensor([1]),
                torch.tensor([0.3], dtype=torch.float64),
            )
            tokens, _ = op.draw(logits, warm, *given, how=op.SamplingLaunch(16, 16, 4))
            assert tokens.tolist() == [winner]


def test_logprobs_of_a_large_vocabulary_are_exact() -> None:
    logits = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 500:3000] = -math.inf  # more than a chunk
    scored = op.score(logits, torch.tensor([0, 20_000, 39_999]), 2)
    wanted = logits.double().log_softmax(-1)
    chosen = wanted.gather(1, torch.tensor([[0], [20_000], [39_999]]))[:, 0]
    torch.testing.assert_close(scored.logprobs.double(), chosen, rtol=GATE, atol=0)
    best = wanted.topk(2).values
    torch.testing.assert_close(scored.top_logprobs.double(), best, rtol=GATE, atol=0)


def test_chunks_grow_with_the_work() -> None:
    assert op.launch(1, 102_400, 132).chunk == 1024
    assert op.launch(256, 102_400, 132).chunk == 4096
    assert op.launch(5, 41, 132) == op.SamplingLaunch(64, 64, 4)
