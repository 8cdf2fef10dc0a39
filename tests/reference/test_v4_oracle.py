"""DeepSeek V4 in `reference/` against transformers, at every position, and against itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_v4 import ALL, EXACT_GATE, EXPERTS, SLIDING, SPARSE, VOCAB, V4Case, V4Checkpoint
from trueline import reference
from trueline.errors import UsageError
from trueline.reference import compressor, model
from trueline.reference.config import Config

Checkpoints = Callable[[V4Case], V4Checkpoint]

FLOAT64_GATE = 2e-5  # in logprob; transformers computes half of it in float32
MARGIN = 1e-5  # between the last choice and the next one; float32 noise is 1e-6

MAIN = V4Case("main")
CASES = [
    MAIN,
    V4Case("plain", yarn=False, layers=(ALL, SPARSE, SLIDING), hashed=0, streams=3),
    V4Case("one entry", topk=1, rates=(2, 7), window=1, layers=(SPARSE, SPARSE), hashed=1),
    V4Case("all entries", topk=50, rates=(5, 3), window=50, layers=(SPARSE, ALL), hashed=2),
    V4Case("rates 4 and 8", topk=3, rates=(4, 8), window=9, layers=(ALL, SPARSE), streams=2),
]
TRUE = V4Case("true rates", rates=(4, 128), window=128, topk=12, layers=(SPARSE, ALL), hashed=1)
FAR = V4Case("far", rates=(4, 128), window=128, topk=40, layers=(SPARSE, ALL), hashed=1)

TOKENS = torch.randint(VOCAB, (1030,), generator=torch.Generator().manual_seed(1))
T = 61


def distance(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == torch.float64
    return (ours - theirs).abs().max().item()


# transformers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_transformers(
    case: V4Case, v4_checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = v4_checkpoints(case)
    oracle = reference.load(checkpoint.path)
    margins: list[float] = []
    choose, largest = model.choose_experts, compressor.largest

    def gap(values: Tensor, k: int) -> None:
        ranked = values.sort(descending=True).values
        gaps = (ranked[:, k - 1] - ranked[:, k]) if ranked.shape[1] > k else torch.zeros(0)
        margins.extend(gaps[gaps.isfinite()].tolist())

    def watched_experts(config: Config, scores: Tensor, bias: Tensor | None) -> Tensor:
        gap(scores if bias is None else scores + bias, config.num_experts_per_tok)
        return choose(config, scores, bias)

    def watched_entries(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
        gap(scores.masked_fill(~seen, float("-inf")), topk)
        return largest(scores, seen, topk)

    monkeypatch.setattr(model, "choose_experts", watched_experts)
    monkeypatch.setattr(compressor, "largest", watched_entries)
    ours = oracle.logprobs(TOKENS[:T])
    assert distance(ours, checkpoint.exact_logprobs(TOKENS[:T])) <= EXACT_GATE
    assert distance(ours, checkpoint.logprobs(TOKENS[:T])) <= FLOAT64_GATE
    assert min(margins, default=1.0) >= MARGIN


@pytest.mark.parametrize("count", [*range(1, 10), 14, 15, 16, 29, 30, 31])
def test_every_length(count: int, v4_checkpoints: Checkpoints) -> None:
    """Windows that are just complete, or lack a token: rates 3 and 5, a window of 7."""
    checkpoint = v4_checkpoints(MAIN)
    ours = reference.load(checkpoint.path).logprobs(TOKENS[:count])
    assert distance(ours, checkpoint.exact_logprobs(TOKENS[:count])) <= EXACT_GATE


@pytest.mark.parametrize("count", [5, 126, 127, 128, 129, 130, 131, 255, 256, 257, 259])
def test_lengths_around_published_windows(count: int, v4_checkpoints: Checkpoints) -> None:
    checkpoint = v4_checkpoints(TRUE)
    ours = reference.load(checkpoint.path).logprobs(TOKENS[:count])
    assert distance(ours, checkpoint.exact_logprobs(TOKENS[:count])) <= EXACT_GATE


def test_beyond_a_thousand_tokens(v4_checkpoints: Checkpoints) -> None:
    """Eight windows of 128, and 257 entries of which a query sees 40."""
    checkpoint = v4_checkpoints(FAR)
    assert len(TOKENS) > 2 * 128 * 4
    ours = reference.load(checkpoint.path).logprobs(TOKENS)
    assert distance(ours, checkpoint.exact_logprobs(TOKENS)) <= EXACT_GATE


def test_the_model_is_adversarial(
    v4_checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong fact must have something to change: spread logits, varied and biased routing, gates
    beyond the clamp on both sides."""
    oracle = reference.load(v4_checkpoints(MAIN).path)
    trace: dict[int, Tensor] = {}
    assert 3 < oracle.logits(TOKENS[:T], trace=trace).abs().max() < 8
    assert trace.keys() == {0, 1, 2, 3}
    for ids in trace.values():
        assert len({frozenset(row) for row in ids.tolist()}) > T // 3
        assert len(set(ids.flatten().tolist())) > EXPERTS // 2
    assert (trace[0] != trace[1]).any()
    choose = model.choose_experts
    monkeypatch.setattr(model, "choose_experts", lambda c, s, b: choose(c, s, None))
    unbiased: dict[int, Tensor] = {}
    oracle.logits(TOKENS[:T], trace=unbiased)
    assert [layer for layer in trace if (trace[layer] != unbiased[layer]).any()] == [2, 3]


# The reference against itself


def test_a_later_token_changes_nothing_before_it(v4_checkpoints: Checkpoints) -> None:
    oracle = reference.load(v4_checkpoints(MAIN).path)
    before = oracle.logprobs(TOKENS[:T])
    for place in (1, 15, 29, T - 1):
        changed = TOKENS[:T].clone()
        changed[place] = (changed[place] + 1) % VOCAB
        after = oracle.logprobs(changed)
        assert (after - before)[:place].abs().max() <= 1e-12
        assert (after - before)[place].abs().max() > 0.1


def test_rotation_is_relative(v4_checkpoints: Checkpoints) -> None:
    """Entries move with their tokens; what is left is the float32 of angles up to 128."""
    oracle = reference.load(v4_checkpoints(MAIN).path)
    here, there = (oracle.logprobs(TOKENS[:T], torch.arange(T) + start) for start in (0, 64))
    assert (here - there).abs().max() < 1e-3
    apart = oracle.logprobs(TOKENS[:T], torch.arange(T) * 17)
    assert (here - apart).abs().max() > 0.1


def test_selections_are_written_down_and_forced(v4_checkpoints: Checkpoints) -> None:
    oracle = reference.load(v4_checkpoints(MAIN).path)
    made: dict[int, Tensor] = {}
    logits = oracle.logits(TOKENS[:T], selected=made)
    assert made.keys() == {1, 3}
    for chosen in made.values():
        assert chosen.shape == (T, MAIN.topk)
        for place, row in enumerate(chosen.tolist()):
            complete = (place + 1) // MAIN.rates[0]
            found = [entry for entry in row if entry >= 0]
            assert row == found + [-1] * (MAIN.topk - len(found))
            assert len(set(found)) == len(found) == min(MAIN.topk, complete)
            assert all(entry < complete for entry in found)
    assert torch.equal(oracle.logits(TOKENS[:T], forced=made), logits)
    other = made[1].clone()
    other[50] = torch.tensor([0, 1, 2, -1])
    off = (oracle.logits(TOKENS[:T], forced={1: other}) - logits).abs().amax(1)
    assert off[:50].max() <= 1e-12
    assert off[50] > 1e-3
    other[49, 0] = 50 // MAIN.rates[0]  # the token after it completes this one
    with pytest.raises(UsageError, match="entries that are complete"):
        oracle.logits(TOKENS[:T], forced={1: other})


def test_of_equal_scores_the_lowest_entry_wins() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 2.0, 3.0]]).repeat(2, 1)
    seen = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    assert compressor.largest(scores, seen, 4).tolist() == [[5, 1, 4, 0], [1, 0, 2, 3]]
    assert compressor.largest(scores, seen, 7)[1].tolist() == [1, 0, 2, 3, -1, -1, -1]


SELECTING = re.compile(r".*(correction_bias|\.indexer\..*)")  # they choose, and do nothing else


def test_gradients_equal_finite_differences(v4_checkpoints: Checkpoints) -> None:
    """Of a random function of all logprobs, for every kind of parameter, all layers and experts
    together, along a random direction."""
    oracle = reference.load(v4_checkpoints(MAIN).path)
    generator = torch.Generator().manual_seed(2)
    tokens = TOKENS[:17]
    weights = torch.randn(len(tokens), VOCAB, generator=generator, dtype=torch.float64)

    def value() -> Tensor:
        return (oracle.logprobs(tokens) * weights).sum()

    trained = {n: p.requires_grad_() for n, p in oracle.params.items() if p.is_floating_point()}
    trace: dict[int, Tensor] = {}
    oracle.logits(tokens, trace=trace)
    value().backward()  # type: ignore[no-untyped-call]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, tensor in trained.items():
        expert = re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)", name)
        unused = expert is not None and int(expert[2]) not in trace[int(expert[1])]
        if unused or SELECTING.fullmatch(name):
            assert tensor.grad is None, name
            continue
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name
        assert tensor.grad.any(), name
        kinds[re.sub(r"\d+", "N", name)].append(name)
    with torch.no_grad():
        for kind, names in kinds.items():
            starts = [oracle.params[name] for name in names]
            steps = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in starts]
            length = 1e-6 / sum(step.square().sum() for step in steps) ** 0.5
            ends = []
            for sign in (1, -1):
                for name, start, step in zip(names, starts, steps, strict=True):
                    oracle.params[name] = start + sign * length * step
                ends.append(value())
            oracle.params.update(zip(names, starts, strict=True))
            grads = [p.grad for p in starts if p.grad is not None]
            expected = sum((g * s).sum() for g, s in zip(grads, steps, strict=True)) * length
            size = sum(g.square().sum() for g in grads) ** 0.5 * 1e-6
            assert abs((ends[0] - ends[1]) / 2 - expected) <= 1e-5 * size, kind


def test_bfloat16_keeps_what_is_precise(v4_checkpoints: Checkpoints) -> None:
    oracle = reference.load(v4_checkpoints(MAIN).path, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in oracle.params.items()}
    precise = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert {re.sub(r".*\.", "", name) for name in precise} == {
        *("sinks", "position_bias", "e_score_correction_bias", "fn", "base", "scale", "weight")
    }
    assert all("indexer.weights_proj" in name for name in precise if name.endswith("weight"))
    assert dtypes["model.layers.0.mlp.gate.tid2eid"] == torch.int64
    logits = oracle.logits(TOKENS[:T])
    assert logits.dtype == torch.float32
    fine = reference.load(v4_checkpoints(MAIN).path).logits(TOKENS[:T])
    assert (logits - fine).abs().mean() < 0.1
