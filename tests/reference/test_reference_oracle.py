"""`reference/` against Hugging Face transformers, at every position, and against itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

import hf
from hf import FLOAT64_GATE, TOKENS, Case, Checkpoints, T, distance
from spread import diagonal
from trueline import reference
from trueline.reference import config as facts
from trueline.reference import indexer, model
from trueline.reference.config import Config

FLOAT32_GATE = 3e-5
ROUNDING_GATE = 1e-6  # once those are imitated, nothing is left but a float32 that falls otherwise
MARGIN = 1e-4  # between the last expert chosen and the first one not; float32 noise is 1e-6
INDEX_MARGIN = 1e-5  # the same for keys, in index scores, which transformers has in float32 only

# Rotation is relative: only distance, not the start, shows what YaRN does to the slow channels.
PLACES = {
    "from 0": torch.arange(T),
    "from 4321": torch.arange(T) + 4321,
    "173 apart": torch.arange(T) * 173 + 4321,
}


V2, V3 = Case("deepseek_v2"), Case("deepseek_v3")


def routing_margin(config: Config, scores: Tensor, bias: Tensor | None) -> float:
    choice = scores if bias is None else scores + bias
    gaps = [(model.limit_groups(config, choice), config.num_experts_per_tok)]
    if config.n_group > 1:
        gaps.append((model.group_scores(config, choice), config.topk_group))
    ranked = [(values.sort(descending=True).values, k) for values, k in gaps]
    return min((values[:, k - 1] - values[:, k]).min().item() for values, k in ranked)


def index_margin(scores: Tensor, topk: int) -> float:
    """The least distance, over all rows, of the last key selected to the first one that is not."""
    gaps = [float("inf")]
    for place, row in enumerate(scores[topk:], topk):
        ranked = row[: place + 1].sort(descending=True).values
        gaps.append(float(ranked[topk - 1] - ranked[topk]))
    return min(gaps)


# transformers


@pytest.mark.parametrize("case", hf.CASES, ids=str)
def test_equals_transformers(
    case: Case, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints(case)
    oracle = reference.load(checkpoint.path)
    margins = []
    choose = model.choose_experts

    def watched(config: Config, scores: Tensor, bias: Tensor | None) -> Tensor:
        margins.append(routing_margin(config, scores, bias))
        return choose(config, scores, bias)

    index_margins = []
    largest = indexer.largest

    def watched_keys(scores: Tensor, topk: int) -> Tensor:
        index_margins.append(index_margin(scores, topk))
        return largest(scores, topk)

    monkeypatch.setattr(model, "choose_experts", watched)
    monkeypatch.setattr(indexer, "largest", watched_keys)
    for positions in PLACES.values():
        ours = oracle.logprobs(TOKENS, positions)
        assert ours.dtype == torch.float64
        assert distance(ours, checkpoint.logprobs(TOKENS, positions, torch.float64)) <= FLOAT64_GATE
        assert distance(ours, checkpoint.logprobs(TOKENS, positions, torch.float32)) <= FLOAT32_GATE
    assert len(margins) == 3 * len(PLACES)  # three of the four layers are MoE
    assert min(margins) >= MARGIN
    assert bool(index_margins) == case.sparse
    assert min(index_margins, default=1.0) >= INDEX_MARGIN


def imitate_rounding(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Round where transformers rounds in a float64 model: norms, router, and V2's rotation."""
    norm, scores = model.rms_norm, model.router_scores

    def norm32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x.float(), torch.ones(()), eps).to(x.dtype) * weight

    def scores32(config: Config, x: Tensor, gate: Tensor) -> Tensor:
        return scores(config, x.float(), gate.float())

    def complex_table(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.float()[:, None] * facts.inverse_frequencies(config)
        rotation = torch.polar(torch.ones_like(angle), angle) * facts.cos_sin_scale(config)
        return rotation.real, rotation.imag

    def complex_rotate(config: Config, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        rotated = pairs * torch.complex(cos.float(), sin.float())
        return torch.view_as_real(rotated).flatten(-2).to(x.dtype)

    monkeypatch.setattr(model, "rms_norm", norm32)
    monkeypatch.setattr(model, "router_scores", scores32)
    if family == "deepseek_v2":
        monkeypatch.setattr(model, "rope_table", complex_table)
        monkeypatch.setattr(model, "rotate", complex_rotate)


@pytest.mark.parametrize("case", hf.CASES, ids=str)
def test_only_rounding_separates_us(
    case: Case, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that FLOAT64_GATE hides no wrong fact: 0.0 where this was written."""
    checkpoint = checkpoints(case)
    imitate_rounding(monkeypatch, case.family)
    oracle = reference.load(checkpoint.path)
    for positions in PLACES.values():
        theirs = checkpoint.logprobs(TOKENS, positions, torch.float64)
        assert distance(oracle.logprobs(TOKENS, positions), theirs) <= ROUNDING_GATE


@pytest.mark.parametrize("case", hf.GRID, ids=str)
def test_models_are_adversarial(
    case: Case, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong fact must have something to change: spread logits, varied and biased routing."""
    oracle = reference.load(checkpoints(case).path)
    trace: dict[int, Tensor] = {}
    assert 4 < oracle.logits(TOKENS, trace=trace).abs().max() < 8
    for ids in trace.values():
        assert len({frozenset(row) for row in ids.tolist()}) > T // 3
        assert len(set(ids.flatten().tolist())) > hf.EXPERTS // 2
    if case.family != "deepseek_v2":
        choose = model.choose_experts
        monkeypatch.setattr(model, "choose_experts", lambda c, s, b: choose(c, s, None))
        unbiased: dict[int, Tensor] = {}
        oracle.logits(TOKENS, trace=unbiased)
        assert all((trace[layer] != unbiased[layer]).any() for layer in trace)


# One of each family; the check "absorbed = expanded" sees all of its cases in test_faults.py.
FIRST = {case.family: case for case in reversed(hf.CASES)}.values()


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FIRST else [pytest.mark.slow]) for case in hf.CASES],
    ids=str,
)
def test_absorbed_equals_expanded(case: Case, checkpoints: Checkpoints) -> None:
    oracle = reference.load(checkpoints(case).path)
    for positions in PLACES.values():
        expanded = oracle.logits(TOKENS, positions)
        absorbed = oracle.logits(TOKENS, positions, form="absorbed")
        assert (absorbed - expanded).abs().max() <= 1e-12 * expanded.abs().max()


# The reference against itself


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_a_later_token_changes_nothing_before_it(form: str, checkpoints: Checkpoints) -> None:
    oracle = reference.load(checkpoints(V3).path)
    before = oracle.logprobs(TOKENS, form=form)
    for place in (1, 17, T - 1):
        changed = TOKENS.clone()
        changed[place] = (changed[place] + 1) % hf.VOCAB
        after = oracle.logprobs(changed, form=form)
        assert (after - before)[:place].abs().max() <= 1e-12
        assert (after - before)[place].abs().max() > 0.1


@pytest.mark.parametrize(
    ("case", "form"), diagonal([V2, replace(V3, q_lora=False)], ["expanded", "absorbed"])
)
def test_gradients_equal_finite_differences(
    case: Case, form: str, checkpoints: Checkpoints
) -> None:
    """Of a random function of all logprobs, for every parameter, along a random direction."""
    oracle = reference.load(checkpoints(case).path)
    generator = torch.Generator().manual_seed(2)
    tokens = TOKENS[:9]
    mix = torch.randn(len(tokens), hf.VOCAB, generator=generator, dtype=torch.float64)

    def value() -> Tensor:
        return (oracle.logprobs(tokens, form=form) * mix).sum()

    for tensor in oracle.params.values():
        tensor.requires_grad_()
    value().backward()  # type: ignore[no-untyped-call]
    reached = {name: p.grad for name, p in oracle.params.items() if p.grad is not None}
    dark = oracle.params.keys() - reached.keys()
    assert all(".experts." in name or "correction_bias" in name for name in dark)
    with torch.no_grad():
        for name, grad in reached.items():
            start = oracle.params[name]
            step = torch.randn(start.shape, generator=generator, dtype=torch.float64)
            step *= 1e-6 / step.norm()
            oracle.params[name] = start + step
            up = value()
            oracle.params[name] = start - step
            down = value()
            oracle.params[name] = start
            expected = (grad * step).sum()
            assert abs((up - down) / 2 - expected) <= 1e-5 * grad.norm() * step.norm(), name


def test_of_equal_scores_the_lowest_index_wins() -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 2.0, 2.0, 3.0]]).repeat(2, 40)
    assert model.top_k(values, 5)[0].tolist() == [1, 3, 4, 7, 9]


def test_rope_table_is_float32(checkpoints: Checkpoints) -> None:
    config = facts.read_config(checkpoints(V3).path)
    for table in model.rope_table(config, torch.tensor([0, 5, 70_000])):
        assert table.dtype == torch.float32
    rotary = checkpoints(V3).model.float().model.rotary_emb
    positions = torch.arange(4000, 4200)
    for ours, theirs in zip(
        model.rope_table(config, positions), rotary(torch.zeros(()), positions[None]), strict=True
    ):
        # one unit in the last place: cos has two CPU paths, chosen by the length of the row
        assert (ours - theirs[0, :, : hf.R // 2]).abs().max() <= 2e-7


def test_bfloat16_rounds_like_transformers(checkpoints: Checkpoints) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, hf.D, generator=generator).bfloat16()
    norm = DeepseekV3RMSNorm(hf.D, eps=1e-5).bfloat16()
    norm.weight.data = torch.randn(hf.D, generator=generator).bfloat16()
    assert torch.equal(model.rms_norm(x, norm.weight, 1e-5), norm(x))

    # without experts, whose choice flips on near-ties, bfloat16 stays near
    checkpoint = checkpoints(replace(V3, moe=False))
    coarse = reference.load(checkpoint.path, torch.bfloat16)
    fine = reference.load(checkpoint.path)
    assert coarse.logits(TOKENS).dtype == torch.bfloat16
    assert coarse.logprobs(TOKENS).dtype == torch.float32
    for form in ("expanded", "absorbed"):
        assert distance(coarse.logprobs(TOKENS, form=form), fine.logprobs(TOKENS)) < 0.3


def test_correction_bias_stays_float32(checkpoints: Checkpoints) -> None:
    oracle = reference.load(checkpoints(V3).path, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in oracle.params.items()}
    biases = [dtypes.pop(name) for name in list(dtypes) if name.endswith("correction_bias")]
    assert set(biases) == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert oracle.logprobs(TOKENS).isfinite().all()
