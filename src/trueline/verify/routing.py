"""Routing on data that random prompts never produce: underflow, ties, biases far below zero.

The expected answer comes from plain Python floats, one expert at a time: a third opinion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.reference import model as reference_model
from trueline.reference.config import Config, read_config
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed

GATE = 1e-12


def routing(subject: Subject) -> None:
    """Expert ids and weights of the reference's router equal a plain reading of the rules."""
    config = read_config(subject.model)
    for name, logits, bias in _adversaries(config):
        gate = torch.eye(logits.shape[1], dtype=torch.float64)
        ids, weights = reference_model.route(config, logits, gate, bias)
        for row in range(len(logits)):
            wanted = plain_route(config, logits[row].tolist(), bias.tolist())
            got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
            worst = max(abs(got.get(e, math.inf) - w) for e, w in wanted.items())
            if got.keys() != wanted.keys() or not worst <= GATE:
                raise CheckFailed(f"routing: {name}: wanted {wanted}, got {got}")


def _adversaries(config: Config) -> Iterator[tuple[str, Tensor, Tensor]]:
    experts = config.n_routed_experts or 0
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    yield "random", 2 * randn(32, experts), 0.3 * randn(experts)
    yield "biases far below zero", 2 * randn(32, experts), -5 - randn(experts).abs()
    yield "every score underflows", -800 - randn(8, experts).abs(), 0.1 * randn(experts)
    yield "large biases, tiny scores", -18 + randn(8, experts), 12 + 0.1 * randn(experts)
    ties = torch.zeros(4, experts, dtype=torch.float64)
    yield "every score equal", ties, torch.zeros(experts, dtype=torch.float64)


def plain_route(config: Config, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Expert id -> weight, in the order of the rules: score, choose, gather, normalise, scale."""
    scores = [math.exp(x) / (1 + math.exp(x)) for x in logits]
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // config.n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(config.n_group)]
    strength = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(config.n_group), key=lambda g: (-strength[g], g))[: config.topk_group]
    allowed = [e for e in range(len(scores)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) + 1e-20
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}
