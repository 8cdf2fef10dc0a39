"""Routing on data that random prompts never produce: underflow, ties, biases far below zero.

The expected answer comes from plain Python floats, one expert at a time: a third opinion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trueline.reference import deepseek_v4
from trueline.reference import model as reference_model
from trueline.reference.config import Config, read_config
from trueline.reference.functional import Pair
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed

GATE = 1e-12


def routing(subject: Subject) -> None:
    routes_plainly(read_config(subject.model))


def routes_plainly(config: Config) -> int:
    """Expert ids and weights of the reference's router equal a plain reading of the rules. Returns
    of how many tokens."""
    count = 0
    for name, logits, bias in _adversaries(config):
        ids, weights = _route(config, logits, bias)
        for row in range(len(logits)):
            wanted = plain_route(
                config, logits[row].tolist(), None if bias is None else bias.tolist()
            )
            got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            worst = max(abs(got.get(e, math.inf) - w) for e, w in wanted.items())
            if got.keys() != wanted.keys() or not worst <= GATE:
                raise CheckFailed(f"routing: {name}: wanted {wanted}, got {got}")
        count += len(logits)
    return count


def _route(config: Config, logits: Tensor, bias: Tensor | None) -> Pair:
    gate = torch.eye(logits.shape[1], dtype=torch.float64)
    if config.v4 is None:
        return reference_model.route(config, logits, gate, bias)
    plain = replace(config, v4=replace(config.v4, hashed=(False,)))
    at = "model.layers.0.mlp.gate"
    assert bias is not None, "V4 has one"
    params = {f"{at}.weight": gate, f"{at}.e_score_correction_bias": bias}
    nothing = torch.zeros(len(logits), dtype=torch.long)
    return deepseek_v4.route(plain, params, 0, logits, nothing)


def _adversaries(config: Config) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    experts = config.n_routed_experts or 0
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    biased = config.scoring_func != "softmax"
    for name, logits, bias in (
        ("random", 2 * randn(32, experts), 0.3 * randn(experts)),
        ("biases far below zero", 2 * randn(32, experts), -5 - randn(experts).abs()),
        ("every score underflows", -800 - randn(8, experts).abs(), 0.1 * randn(experts)),
        ("large biases, tiny scores", -18 + randn(8, experts), 12 + 0.1 * randn(experts)),
        (
            "every score equal",
            torch.zeros(4, experts, dtype=torch.float64),
            torch.zeros(experts, dtype=torch.float64),
        ),
    ):
        yield name, logits, bias if biased else None


def plain_route(config: Config, logits: list[float], bias: list[float] | None) -> dict[int, float]:
    """Expert id -> weight, in the order of the rules: score, choose, gather, normalise, scale."""
    scores = plain_scores(config.scoring_func, logits)
    choice = [score + b for score, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(scores) // config.n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(config.n_group)]
    counted = 1 if config.family == "deepseek_v2" else 2
    strength = [sum(sorted(group)[-counted:]) for group in groups]
    best = sorted(range(config.n_group), key=lambda g: (-strength[g], g))[: config.topk_group]
    allowed = [e for e in range(len(scores)) if config.n_group == 1 or e // size in best]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) + 1e-20 if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


def plain_scores(kind: str, logits: list[float]) -> list[float]:
    if kind == "softmax":
        most = max(logits)
        powers = [math.exp(x - most) for x in logits]
        return [power / sum(powers) for power in powers]
    if kind == "sqrtsoftplus":
        return [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    return [math.exp(x) / (1 + math.exp(x)) for x in logits]
