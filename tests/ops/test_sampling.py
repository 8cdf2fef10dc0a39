"""Sampling against its definition, against the distributions it means, and against the company
it is in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spread import diagonal
from trueline.device import interpreting
from trueline.engine.params import SamplingParams
from trueline.errors import UsageError
from trueline.ops.sampling import Sampled, SamplingState, build_rows, cpu, reference, triton
from trueline.verify.ops.sampling import EOS, GATE, alone_or_together, hard_logits, row, same
from trueline.verify.ops.sampling import draw as checked_draw

IMPLEMENTATIONS = [cpu, reference, *([triton] if interpreting() else [])]


def draw(logits: Tensor, states: Sequence[SamplingState], op: ModuleType = cpu) -> Sampled:
    return checked_draw(op, logits, states)


# Against the definition


@st.composite
def states(draw: Any, vocab_size: int) -> SamplingState:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    token = st.integers(0, vocab_size - 1)
    fields: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 1.7, 1e3])),
        "top_k": draw(st.sampled_from([0, -1, 1, 2, 5, vocab_size, vocab_size + 9])),
        "top_p": draw(st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999])),
        "min_p": draw(st.sampled_from([0.0, 1e-8, 0.05, 0.5, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 1.5, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.4, -1.0])),
        "logit_bias": draw(
            st.dictionaries(token, st.sampled_from([-100.0, -1.5, 3.0]), max_size=3)
        ),
        "allowed_token_ids": draw(st.none() | st.lists(token, min_size=1, max_size=5)),
        "min_tokens": draw(st.sampled_from([0, 3])),
        "stop_token_ids": draw(st.lists(token, max_size=1)),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 1, 4, -1])),
    }
    words = draw(st.lists(st.lists(token, min_size=1, max_size=2), max_size=2))
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    return row(draw(tokens) or [0], draw(tokens), seed, words, **fields)


@given(data=st.data())
def test_cpu_is_the_reference(data: Any) -> None:
    rows = data.draw(st.lists(states(7), min_size=1, max_size=5))
    logits = hard_logits(len(rows), 7, data.draw(st.integers(0, 10**6)))
    same(draw(logits, rows), draw(logits, rows, reference), tolerance=GATE)


@given(data=st.data())
def test_cpu_is_the_reference_with_a_large_vocabulary(data: Any) -> None:
    """More tokens than top-p looks at first."""
    rows = data.draw(st.lists(states(5003), min_size=1, max_size=2))
    rows = [
        replace(state, params=msgspec.structs.replace(state.params, logprobs=4)) for state in rows
    ]
    logits = hard_logits(len(rows), 5003, data.draw(st.integers(0, 10**6)))
    same(draw(logits, rows), draw(logits, rows, reference), tolerance=GATE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype: torch.dtype) -> None:
    """Logits of a padded vocabulary, and every other row of a buffer."""
    wide = hard_logits(8, 5100, 3).clamp(-200, 200).to(dtype)
    wide[:, 5003:] = math.nan  # what is outside is not ours
    wide[1::2] = math.nan
    view = wide[::2, :5003]
    assert not view.is_contiguous()
    rows = [
        row(temperature=0, logprobs=3),
        row(temperature=0.8, top_p=0.9, logprobs=3),
        row(temperature=1.0, logprobs=3, repetition_penalty=1.2),
        row(temperature=0, logit_bias={3: 1.0}),
    ]
    same(draw(view, rows), draw(view.contiguous(), rows))
    same(draw(view, rows), draw(view, rows, reference), tolerance=GATE)
    assert not draw(view, rows).bad.any()


def test_nothing_is_written_into_the_logits() -> None:
    """`draw` checks it, here where no conversion makes a copy."""
    logits = hard_logits(2, 9, 1).double()
    draw(logits, [row(repetition_penalty=2.0, bad_words=[[3]]), row(logit_bias={1: 2.0})])


# Each feature by hand


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_greedy_takes_the_lowest_of_equals(op: ModuleType) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -1.0, 0.0, -1.0]])
    plain = [row(temperature=0)] * 2
    assert draw(logits, plain, op).tokens.tolist() == [1, 0]
    edited = [row(temperature=0, logit_bias={3: 3.0})] * 2
    assert draw(logits, edited, op).tokens.tolist() == [1, 3]
    one = [row(temperature=1.0, top_k=1, seed=s) for s in (1, 2)]
    assert draw(logits, one, op).tokens.tolist() == [1, 0]
    tiny = [row(temperature=2.0, top_p=1e-12, seed=s) for s in (1, 2)]
    assert draw(logits, tiny, op).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_penalties(op: ModuleType) -> None:
    """Each is just enough, or just not enough, to change the winner."""
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]])

    def winner(prompt: list[int], output: list[int], x: Tensor = logits, **params: Any) -> int:
        state = row(prompt, output, temperature=0, **params)
        return int(draw(x, [state], op).tokens[0])

    assert winner([0], []) == 0
    # repetition: prompt and output, divides what is positive, multiplies what is not
    assert winner([0], [], repetition_penalty=1.99) == 0
    assert winner([0], [], repetition_penalty=2.01) == 1
    assert winner([3], [0, 0, 0], repetition_penalty=1.99) == 0
    assert winner([3], [0], repetition_penalty=2.01) == 1
    negative = torch.tensor([[-1.0, -1.5, -9.0, -9.0]])
    assert winner([0], [], negative, repetition_penalty=1.4) == 0
    assert winner([0], [], negative, repetition_penalty=1.6) == 1
    assert winner([1], [], negative, repetition_penalty=0.5) == 1
    # presence: once, output only
    assert winner([0], [], presence_penalty=2.0) == 0
    assert winner([3], [0, 0], presence_penalty=0.9) == 0
    assert winner([3], [0, 0], presence_penalty=1.1) == 1
    # frequency: each time, output only
    assert winner([0, 0], [], frequency_penalty=2.0) == 0
    assert winner([3], [0, 0], frequency_penalty=0.49) == 0
    assert winner([3], [0, 0], frequency_penalty=0.51) == 1
    assert winner([3], [1, 1], frequency_penalty=-0.6) == 1
    # repetition comes first: 2 / 2 - 0.3 = 0.7 against (2 - 0.3) / 2 = 0.85
    other = torch.tensor([[2.0, 0.8, -1.0, 0.5]])
    assert winner([3], [0], other, repetition_penalty=2.0, presence_penalty=0.3) == 1


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_bias_allowed_and_banned(op: ModuleType) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]] * 9)
    rows = [
        row(temperature=0, logit_bias={3: 4.0}),
        row(temperature=0, logit_bias={0: -100.0}),
        row(temperature=0, allowed_token_ids=[4, 3]),
        row(temperature=0, bad_words=[[0]]),
        row(temperature=0, output=[1], bad_words=[[1, 0], [2, 1]]),
        row(temperature=0, output=[1, 3], bad_words=[[1, 0]]),
        row(temperature=0, output=[2, 1], bad_words=[[2, 1, 0], [3, 1, 1]]),
        row(temperature=0, allowed_token_ids=[0, 1], bad_words=[[0]], logit_bias={0: 100.0}),
        row(temperature=0, bad_words=[[0], [999]]),
    ]
    assert draw(logits, rows, op).tokens.tolist() == [3, 1, 3, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_min_tokens_counts_exactly(op: ModuleType) -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 8.0, 8.5]])
    for generated in range(5):
        state = row(output=[0] * generated, temperature=0, min_tokens=3, stop_token_ids=[4])
        # 2 and 5 end the text, 4 is a stop token
        assert int(draw(logits, [state], op).tokens[0]) == (3 if generated < 3 else 2)
    ignoring = row(temperature=0, min_tokens=3, stop_token_ids=[4], ignore_eos=True)
    assert int(draw(logits, [ignoring], op).tokens[0]) == 2
    # counted by position: the tokens themselves may not be known yet
    late = SamplingState(
        params=SamplingParams(temperature=0, min_tokens=3),
        prompt_ids=[1],
        output_ids=[],
        position=4,
        eos_ids=EOS,
        seed=0,
    )
    assert int(draw(logits, [late], op).tokens[0]) == 2


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_logprobs_are_raw(op: ModuleType) -> None:
    """The same whatever is done to the logits afterwards."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -math.inf]])
    wanted = logits.double().log_softmax(-1)[0]
    changes: list[dict[str, Any]] = [
        {"logit_bias": {0: 50.0}},
        {"allowed_token_ids": [0]},
        {"bad_words": [[1], [2], [3]]},
        {"temperature": 5.0, "allowed_token_ids": [0]},
        {"output": [1, 2, 3], "presence_penalty": 2.0, "repetition_penalty": 9.0},
    ]
    for change in changes:
        sampled = draw(logits, [row(**{"temperature": 0, "logprobs": 4, **change})], op)
        assert sampled.tokens.tolist() == [0]
        assert sampled.ranks.tolist() == [4]
        assert float(sampled.logprobs[0]) == pytest.approx(float(wanted[0]), rel=GATE)
        assert sampled.top_ids.tolist() == [[1, 2, 3, 0]]
        assert sampled.top_logprobs[0].tolist() == pytest.approx(
            wanted[[1, 2, 3, 0]].tolist(), rel=GATE
        )
    tied = draw(logits, [row(temperature=0, logprobs=0, allowed_token_ids=[3])], op)
    assert tied.ranks.tolist() == [2]
    assert tied.top_ids.shape == (1, 0)
    two = [row(temperature=0, logprobs=-1), row(temperature=0)]
    everything = draw(logits.repeat(2, 1), two, op)
    assert everything.top_ids.tolist() == [[1, 2, 3, 0, 4], [-1] * 5]
    assert everything.ranks.tolist() == [1, 0]
    assert math.isnan(everything.logprobs[1])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_scores_of_given_tokens(op: ModuleType) -> None:
    logits = hard_logits(12, 41, 5)
    logits[3, 7] = math.nan
    tokens = torch.arange(12)
    scored = op.score(logits, tokens, 6)
    wanted = logits.double().log_softmax(-1)
    for i in range(12):
        if i == 3:
            assert math.isnan(scored.logprobs[i])
            assert scored.ranks[i] == 0
            assert (scored.top_ids[i] == -1).all()
            continue
        chosen = float(wanted[i, i])
        assert float(scored.logprobs[i]) == pytest.approx(chosen, rel=GATE)
        assert scored.ranks[i] == 1 + (logits[i] > logits[i, i]).sum()
        assert (
            scored.top_ids[i].tolist()
            == sorted(range(41), key=lambda t: (-float(logits[i, t]), t))[:6]
        )


def test_logprobs_of_a_large_vocabulary_are_exact() -> None:
    """Forty rows, so that they do not all fit at once."""
    logits = torch.randn(40, 130_000, generator=torch.Generator().manual_seed(1)) * 3
    scored = cpu.score(logits, torch.arange(40), 2)
    wanted = logits.double().log_softmax(-1)
    chosen = wanted.gather(1, torch.arange(40)[:, None])[:, 0]
    torch.testing.assert_close(scored.logprobs.double(), chosen, rtol=GATE, atol=0)
    best = wanted.topk(2).values
    torch.testing.assert_close(scored.top_logprobs.double(), best, rtol=GATE, atol=0)


# Bad rows


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.5}])
def test_bad_rows(op: ModuleType, params: dict[str, Any]) -> None:
    good = hard_logits(1, 50, 8)[0]
    spoiled = good.repeat(6, 1)
    spoiled[1, 40] = math.nan
    spoiled[2, 3] = math.inf
    spoiled[3] = -math.inf
    spoiled[4, 3] = -math.inf
    states = [row(seed=i, logprobs=2, **params) for i in range(6)]
    sampled = draw(spoiled, states, op)
    assert sampled.bad.tolist() == [False, True, True, True, False, False]
    assert sampled.tokens[1:4].tolist() == [0, 0, 0]
    assert sampled.logprobs.isnan().tolist() == sampled.bad.tolist()
    keep = [0, 5]
    alone = draw(good.repeat(2, 1), [states[i] for i in keep], op)
    same(alone, sampled, keep)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_take(op: ModuleType, temperature: float) -> None:
    states = [
        row(temperature=temperature, allowed_token_ids=[2, 5], min_tokens=1, logprobs=1),
        row(temperature=temperature, allowed_token_ids=[1], bad_words=[[1]], top_p=0.5),
        row(temperature=temperature, allowed_token_ids=[1], top_k=3),
    ]
    sampled = draw(torch.zeros(3, 8), states, op)
    assert sampled.bad.tolist() == [True, True, False]
    assert sampled.tokens.tolist() == [0, 0, 1]
    assert math.isnan(sampled.logprobs[0])
    # what is masked out may still be broken
    broken = torch.zeros(1, 8)
    broken[0, 6] = math.nan
    assert draw(broken, [states[2]], op).bad.tolist() == [True]


def test_no_rows() -> None:
    sampled = draw(torch.zeros(0, 9), [])
    assert sampled.tokens.shape == sampled.bad.shape == (0,)
    assert sampled.top_ids.shape == (0, 0)


# The noise


def uniforms(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """[R, M] of what the noise was made from."""
    gumbel = cpu.noise(cpu._keys(seed, position), token)
    return torch.exp(-torch.exp(-gumbel))


def test_noise_is_the_written_function() -> None:
    """int64 that wraps around against Python's own numbers."""
    ends = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]
    for seed in ends:
        for position in (0, 1, 4095, 2**40):
            tokens = torch.tensor([0, 1, 2, 163839])
            found = cpu.noise(cpu._keys(torch.tensor([seed]), torch.tensor([position])), tokens)
            wanted = [reference.noise(seed, position, int(token)) for token in tokens]
            assert found[0].tolist() == pytest.approx(wanted, rel=1e-14, abs=1e-14)


def chi_square_ok(counts: Tensor, expected: Tensor) -> bool:
    """Within 4.5 standard deviations, by Wilson and Hilferty: one in 300,000 by chance."""
    assert float(expected.min()) >= 5
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    cube = (statistic / degrees) ** (1 / 3)
    z = (cube - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return abs(z) < 4.5


STREAMS = {
    "tokens": lambda n: (torch.tensor([3]), torch.tensor([11]), torch.arange(n)),
    "seeds": lambda n: (torch.arange(n), torch.tensor([11]).expand(n), torch.tensor([5])),
    "negative seeds": lambda n: (-torch.arange(n), torch.zeros(n).long(), torch.tensor([0])),
    "positions": lambda n: (torch.tensor([3]).expand(n), torch.arange(n), torch.tensor([5])),
    "all": lambda n: (torch.arange(n // 64), torch.arange(n // 64), torch.arange(64)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_noise_is_uniform(name: str) -> None:
    """Along each counter alone: chi-square over 256 cells, Kolmogorov and Smirnov, extremes."""
    n = 1 << 18
    u = uniforms(*STREAMS[name](n)).flatten()
    assert len(u) == n
    counts = torch.histc(u, 256, 0, 1)
    assert chi_square_ok(counts, torch.full((256,), n / 256))
    ordered = u.sort().values
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum(steps - ordered, ordered - steps + 1 / n).max())
    assert distance * math.sqrt(n) < 2.4  # one in 100,000
    assert float(u.min()) < 20 / n
    assert float(u.max()) > 1 - 20 / n


@pytest.mark.parametrize("name", ["tokens", "seeds", "negative seeds", "positions"])
def test_neighbours_are_independent(name: str) -> None:
    """Pairs at small distances fill the unit square evenly."""
    n = 1 << 17
    u = uniforms(*STREAMS[name](n)).flatten()
    for gap in (1, 2, 3, 64, 1000):
        cells = (u[:-gap] * 16).long() * 16 + (u[gap:] * 16).long()
        counts = torch.bincount(cells, minlength=256).double()
        assert chi_square_ok(counts, torch.full((256,), (n - gap) / 256)), gap


def test_counters_do_not_stand_in_for_each_other() -> None:
    """Seed 3 at position 4 is not seed 4 at position 3, nor is a later token an earlier one of the
    next position."""
    seed = torch.arange(64).repeat_interleave(64)
    position = torch.arange(64).repeat(64)
    u = uniforms(seed, position, torch.arange(16))
    assert len(u.unique()) == 64 * 64 * 16


# Distributions


def frequencies(logits: Tensor, n: int, by: str, **params: Any) -> Tensor:
    """Draws of one row, over many seeds or over many positions."""
    state = SamplingParams(**params)
    rows = [
        SamplingState(
            params=state,
            prompt_ids=[0],
            output_ids=[],
            position=1 if by == "seed" else i,
            eos_ids=(),
            seed=i if by == "seed" else 99,
        )
        for i in range(n)
    ]
    sampled = cpu.sample(logits.expand(n, -1), build_rows(rows))
    return torch.bincount(sampled.tokens, minlength=logits.shape[-1]).double()


LOGITS = torch.tensor([1.0, 0.5, 0.5, -0.3, 2.0, -1.0, 0.0, -2.5])


def expected(logits: Tensor, temperature: float, kept: Sequence[int]) -> Tensor:
    p = torch.zeros(len(logits), dtype=torch.float64)
    p[list(kept)] = (logits.double()[list(kept)] / temperature).softmax(-1)
    return p


KEPT: list[tuple[dict[str, Any], Sequence[int]]] = [
    ({}, range(8)),
    ({"temperature": 0.7}, range(8)),
    ({"temperature": 3.0}, range(8)),
    ({"top_k": 3}, [4, 0, 1]),
    ({"top_k": 4}, [4, 0, 1, 2]),
    ({"top_p": 0.6}, [4, 0]),
    ({"top_p": 0.69}, [4, 0, 1]),
    ({"top_p": 0.85}, [4, 0, 1, 2]),
    ({"top_p": 0.9}, [4, 0, 1, 2, 6]),
    ({"min_p": 0.2}, [4, 0, 1, 2]),
    ({"temperature": 2.0, "min_p": 0.3}, [4, 0, 1, 2, 6, 3]),
    ({"top_k": 3, "top_p": 0.9}, [4, 0, 1]),
    ({"top_k": 3, "top_p": 0.7}, [4, 0]),  # top-p of what top-k left
    ({"top_k": 7, "top_p": 0.6}, [4, 0]),
]


@pytest.mark.parametrize(("case", "by"), diagonal(KEPT, ["seed", "position"]))
def test_frequencies(case: tuple[dict[str, Any], Sequence[int]], by: str) -> None:
    params, kept = case
    n = 20_000
    counts = frequencies(LOGITS, n, by, **params)
    p = expected(LOGITS, params.get("temperature", 1.0), kept)
    outside = p == 0
    assert counts[outside].sum() == 0
    assert chi_square_ok(counts[~outside], p[~outside] * n)


def test_frequencies_of_a_large_vocabulary() -> None:
    """Grouped by likelihood; the nucleus is larger than what is looked at first."""
    logits = torch.linspace(3, -3, 5003)[torch.randperm(5003, generator=torch.Generator())]
    n = 1500
    p = logits.double().softmax(-1)
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    kept = order[before < 0.8]
    assert len(kept) > 1024 + 200
    counts = frequencies(logits, n, "seed", top_p=0.8)
    inside = torch.zeros(5003, dtype=torch.bool)
    inside[kept] = True
    assert counts[~inside].sum() == 0
    groups = kept.chunk(12)
    found = torch.stack([counts[g].sum() for g in groups])
    wanted = torch.stack([p[g].sum() for g in groups]) / p[kept].sum() * n
    assert chi_square_ok(found, wanted)


def test_neighbouring_positions_draw_independently() -> None:
    """One sequence's successive draws: every pair as often as its parts say."""
    n = 40_000
    rows = [
        SamplingState(
            params=SamplingParams(), prompt_ids=[0], output_ids=[], position=i, eos_ids=(), seed=5
        )
        for i in range(n)
    ]
    tokens = cpu.sample(LOGITS[:4].expand(n, -1), build_rows(rows)).tokens
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    p = LOGITS[:4].double().softmax(-1)
    assert chi_square_ok(pairs, torch.outer(p, p).flatten() * (n - 1))


# Company


@pytest.mark.parametrize("threads", [1, 2])
def test_alone_is_in_a_batch(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone_or_together(cpu)
    finally:
        torch.set_num_threads(before)


def test_a_seed_holds_beside_unseeded_neighbours() -> None:
    logits = LOGITS.expand(3, -1)
    seeded = [int(draw(LOGITS[None], [row(seed=4, output=[0] * i)]).tokens[0]) for i in range(40)]
    assert len(set(seeded)) > 2
    for i in range(40):
        others = [row(seed=1000 + i), row(seed=4, output=[0] * i), row(seed=-i, top_k=2)]
        assert int(draw(logits, others).tokens[1]) == seeded[i]


def test_filters_do_not_move_the_draw() -> None:
    """A token that wins unfiltered wins whenever it is kept: its noise is its own."""
    logits = torch.randn(300, 300, generator=torch.Generator().manual_seed(4)) * 3
    free = draw(logits, [row(seed=i) for i in range(300)]).tokens
    p = logits.double().softmax(-1)
    order = p.argsort(dim=-1, descending=True)
    place = order.argsort(dim=-1)
    before = (p.gather(1, order).cumsum(-1) - p.gather(1, order)).gather(1, place)
    kept = {
        "top_k": (5, place < 5),
        "top_p": (0.7, before < 0.7),
        "min_p": (0.1, p >= 0.1 * p.amax(-1, keepdim=True)),
    }
    for name, (value, mask) in kept.items():
        found = draw(logits, [row(seed=i, **{name: value}) for i in range(300)]).tokens
        stays = mask.gather(1, free[:, None])[:, 0]
        assert 100 < int(stays.sum()) < 300
        assert torch.equal(found[stays], free[stays])
        assert mask.gather(1, found[:, None]).all()
    allowed = [row(seed=i, allowed_token_ids=[int(free[i]), 7]) for i in range(300)]
    assert torch.equal(draw(logits, allowed).tokens, free)


def test_each_row_has_its_own_filters() -> None:
    """Flat logits, so that every kept token comes up: rows of other widths do not widen it."""
    num_seeds, limits = 60, (1, 2, 3, 5, 8)
    states = [row(seed=s, top_k=k) for s in range(num_seeds) for k in limits]
    tokens = draw(torch.zeros(len(states), 40), states).tokens.view(num_seeds, -1)
    for column, k in enumerate(limits):
        assert set(tokens[:, column].tolist()) == set(range(k))
    states = [row(seed=s, top_p=k / 40 - 0.01) for s in range(num_seeds) for k in limits]
    tokens = draw(torch.zeros(len(states), 40), states).tokens.view(num_seeds, -1)
    for column, k in enumerate(limits):
        assert set(tokens[:, column].tolist()) == set(range(k))


# Rows from requests


def test_rows_are_built_from_requests() -> None:
    states = [
        row(temperature=0),
        row(temperature=0, ignore_eos=True, logprobs=3),
        row([1, 1, 2], [3, 3], repetition_penalty=1.5, temperature=0),
        row([1, 1, 2], [3, 3], presence_penalty=0.5, top_k=-1),
        row(logit_bias={9: 1.0}, allowed_token_ids=[1, 2], top_k=5, min_tokens=1),
    ]
    rows = build_rows(states)
    assert rows.edited == (2, 3, 4)
    assert rows.drawn == (3, 4)
    assert rows.narrowed == (4,)
    assert rows.asked == (1,)
    assert rows.num_top == 3
    assert rows.top_k.tolist() == [0, 0, 0, 0, 5]
    assert rows.temperature.tolist() == [0, 0, 0, 1, 1]
    assert rows.position.tolist() == [3, 3, 5, 5, 3]
    assert rows.seen is not None
    seen = rows.seen
    listed = zip(seen.row.tolist(), seen.token.tolist(), seen.value.tolist(), strict=True)
    assert sorted(listed) == [(2, 1, 0.0), (2, 2, 0.0), (2, 3, 2.0), (3, 3, 2.0)]
    assert rows.banned is not None
    assert sorted(rows.banned.token.tolist()) == [2, 5]
    plain = build_rows(states[:2])
    assert plain.seen is plain.bias is plain.allowed is plain.banned is None
    assert plain.edited == plain.drawn == ()


def test_tokens_are_counted_once() -> None:
    output = [3]
    state = row([1], output, frequency_penalty=1.0, repetition_penalty=1.1)
    assert state.seen() == {1: 0, 3: 1}
    output += [3, 1]
    assert state.seen() == {1: 1, 3: 2}
    assert state._num_counted == 3
    del output[1:]
    assert state.seen() == {1: 0, 3: 1}


def test_who_must_wait_for_tokens() -> None:
    assert not row(min_tokens=5, bad_words=[[4]], logit_bias={1: 1.0}).needs_output_ids
    assert row(bad_words=[[4, 5]]).needs_output_ids
    assert row(presence_penalty=0.1).needs_output_ids


def test_leading_is_a_stable_sort() -> None:
    x = hard_logits(30, 400, 2).double()
    wanted = x.sort(dim=-1, descending=True, stable=True).indices
    for k in (0, 1, 7, 399, 400):
        assert torch.equal(cpu.leading(x, k), wanted[:, :k])


def test_params_name_the_model_s_limits() -> None:
    with pytest.raises(UsageError, match="ids below 8"):
        SamplingParams(logit_bias={8: 1.0}).check_model(8)
