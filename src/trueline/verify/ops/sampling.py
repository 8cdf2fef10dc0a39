"""Sampling against its definition; alone and in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trueline.engine.params import SamplingParams
from trueline.ops.sampling import Sampled, Sampling, SamplingState, Scored, build_rows, reference
from trueline.verify.bounds import rounding
from trueline.verify.ops.data import require

EOS = (2, 5)
GATE = rounding(2)
"""Of a logprob, relative to it: float64, rounded to float32 once, as is the reference's."""


def row(
    prompt: Sequence[int] = (1, 4, 4),
    output: list[int] | None = None,
    seed: int = 7,
    bad_words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> SamplingState:
    output = [] if output is None else output
    position = len(prompt) + len(output)
    return SamplingState(
        params=SamplingParams(**params),
        prompt_ids=prompt,
        output_ids=output,
        position=position,
        eos_ids=EOS,
        seed=seed,
        bad_words=bad_words,
    )


def draw(op: Sampling, logits: Tensor, states: Sequence[SamplingState]) -> Sampled:
    before = logits.clone()
    sampled: Sampled = op.sample(logits, build_rows(states, logits.device))
    kept = torch.equal(torch.nan_to_num(logits), torch.nan_to_num(before))
    require(kept, "sampling writes the logits")
    return sampled


def hard_logits(
    rows: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Ties, large and tiny gaps, -Inf, signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab_size, generator=generator, device="cpu") * 3
    kind = torch.randint(0, 6, (rows, 1), generator=generator, device="cpu")
    x = torch.where(kind == 1, x.round(), x)  # many ties
    x = torch.where(kind == 2, x * 100, x)
    x = torch.where(kind == 3, x * 1e-6, x)
    x = torch.where(kind == 4, torch.zeros_like(x), x)
    x = torch.where((kind == 5) & (x < 0), -math.inf, x)
    x[:, 0] = torch.where(x[:, 0].isinf(), -0.0, x[:, 0])
    return x.to(torch.get_default_device(), dtype)


def batch(
    dtype: torch.dtype = torch.float32, vocab: int = 2500
) -> tuple[Tensor, list[SamplingState]]:
    """Every kind of row. Some need a whole vocabulary sorted, some ask for all logprobs."""
    logits = hard_logits(14, vocab, 21, dtype)
    logits[9] = torch.linspace(0, 1, vocab)
    logits[13, 5] = math.nan
    return logits, [
        row(temperature=0),
        row(temperature=0, logprobs=2),
        row(seed=1),
        row(seed=1, temperature=0.7, logprobs=5),
        row(seed=2, top_k=20),
        row(seed=3, top_p=0.9),
        row(seed=4, top_k=1500, top_p=0.99, logprobs=1),
        row(seed=5, min_p=0.1, temperature=1.5),
        row(seed=6, output=[7, 7, 9], repetition_penalty=1.3, frequency_penalty=0.5),
        row(seed=7, top_p=0.95),
        row(seed=8, allowed_token_ids=[3, 4, 5], logprobs=0),
        row(temperature=0, logit_bias={77: 30.0}, min_tokens=2),
        row(seed=9, bad_words=[[4], [1, 2]], logprobs=-1),
        row(seed=10, logprobs=3),
    ]


def same(
    a: Sampled, b: Sampled, rows: slice | list[int] = slice(None), tolerance: float = 0.0
) -> None:
    """Equal, or within `tolerance` in logprobs."""
    for name in ("tokens", "bad"):
        require(torch.equal(getattr(a, name), getattr(b, name)[rows]), f"sampling: {name} differ")
    same_scores(a, b, rows, tolerance)


def same_scores(
    a: Scored, b: Scored, rows: slice | list[int] = slice(None), tolerance: float = 0.0
) -> None:
    k = a.top_ids.shape[1]
    require(torch.equal(a.ranks, b.ranks[rows]), "sampling: ranks differ")
    require(torch.equal(a.top_ids, b.top_ids[rows][:, :k]), "sampling: likeliest tokens differ")
    for name in ("logprobs", "top_logprobs"):
        x, y = getattr(a, name), getattr(b, name)[rows]
        y = y[:, :k] if y.ndim == 2 else y
        near = torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        require(near, f"sampling: {name} differ")


def sampling(op: Sampling, dtype: torch.dtype = torch.float32) -> None:
    logits, states = batch(dtype)
    same(draw(op, logits, states), draw(reference, logits, states), tolerance=GATE)
    for seed in range(12):  # every kind of row on every kind of logits, strided
        wide = hard_logits(14, 97, seed, dtype)
        view = wide[:, 3:90]
        same(draw(op, view, states), draw(reference, view, states), tolerance=GATE)


def penalties(op: Sampling, dtype: torch.dtype = torch.float32) -> None:
    """Few words, many rows: what a penalty is wrong by decides which is the likeliest."""
    rows, vocab = 96, 7
    generator = torch.Generator(device="cpu").manual_seed(3)

    def some(words: int) -> list[int]:
        return torch.randint(vocab, (words,), generator=generator, device="cpu").tolist()

    states = [
        row(
            prompt=some(3),
            output=some(i % 4),
            temperature=0,
            repetition_penalty=(1.0, 1.6, 0.7)[i % 3],
            frequency_penalty=(0.0, 0.4, -0.3)[i // 3 % 3],
            presence_penalty=(0.0, 0.5, -0.6)[i // 9 % 3],
        )
        for i in range(rows)
    ]
    logits = torch.randn(rows, vocab, generator=generator, device="cpu")
    logits[1::2] -= 3  # of these all are negative
    logits = logits.to(torch.get_default_device(), dtype)
    same(draw(op, logits, states), draw(reference, logits, states), tolerance=GATE)


def of_vocabulary(op: Sampling, dtype: torch.dtype, vocab: int) -> None:
    """`vocab` words: enough for the tokens of the rows."""
    logits, states = batch(dtype, vocab)
    same(draw(op, logits, states), draw(reference, logits, states), tolerance=GATE)


def scores(op: Sampling, dtype: torch.dtype = torch.float32) -> None:
    logits = hard_logits(12, 41, 5, dtype)
    logits[3, 7] = math.nan
    targets = torch.arange(12)
    for num_top in (0, 6, 100):
        exact = reference.score(logits, targets, num_top)
        same_scores(op.score(logits, targets, num_top), exact, tolerance=GATE)


def alone_or_together(op: Sampling, dtype: torch.dtype = torch.float32) -> None:
    """Bitwise, in any order and any batch."""
    logits, states = batch(dtype)
    whole = draw(op, logits, states)
    for i, state in enumerate(states):
        same(draw(op, logits[i : i + 1], [state]), whole, [i])
    for order in (list(range(13, -1, -1)), [5, 2], [9, 4, 0], [3, 12, 7, 1, 6]):
        mixed = draw(op, logits[order], [states[i] for i in order])
        for place, i in enumerate(order):
            same(draw(op, logits[i : i + 1], [states[i]]), mixed, [place])
