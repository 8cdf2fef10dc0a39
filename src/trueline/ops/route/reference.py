"""One token, one expert at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.ops.route import IMPLEMENTATIONS, pack
from trueline.ops.route import logits as router_logits
from trueline.spec.feedforward import RouterSpec, Scoring

__all__ = ["capabilities", "choose", "pack", "run"]

capabilities = IMPLEMENTATIONS["reference"]


def choose(
    x: Tensor,
    packed: Opaque,
    linear: LinearOp,
    bias: Tensor | None,
    router: RouterSpec,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return run(router_logits(x, packed, linear), bias, router, forced)


def run(
    logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows = [
        _one(logits[i].double(), bias, router, None if forced is None else forced[i].tolist())
        for i in range(len(logits))
    ]
    ids = torch.tensor([[e for e, _ in row] for row in rows], dtype=torch.long)
    weights = torch.tensor([[w for _, w in row] for row in rows], dtype=torch.float64)
    shape = (len(logits), router.top_k)
    return ids.view(shape), weights.view(shape).float()


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case "softmax":
            exponents = (logits - logits.max()).exp()
            return exponents / exponents.sum()
        case "sigmoid":
            return 1 / (1 + (-logits).exp())
        case "sqrtsoftplus":
            return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


def _one(
    logits: Tensor, bias: Tensor | None, router: RouterSpec, forced: list[int] | None
) -> list[tuple[int, float]]:
    scores = _scores(logits, router.scoring)
    choice = (scores + bias.double() if bias is not None else scores).tolist()
    size = len(choice) // router.num_groups

    def strength(group: int) -> float:
        members: list[float] = sorted(choice[group * size : (group + 1) * size], reverse=True)
        return members[0] if router.group_score == "max" else sum(members[:2])

    allowed = range(len(choice))
    if router.num_groups > 1:
        order = sorted(range(router.num_groups), key=lambda g: (-strength(g), g))
        kept = set(order[: router.top_groups])
        allowed = [e for e in allowed if e // size in kept]  # type: ignore[assignment]
    chosen = forced or sorted(allowed, key=lambda e: (-choice[e], e))[: router.top_k]
    weights = [float(scores[e]) for e in chosen]
    if router.renormalise:
        total = sum(weights) + 1e-20
        weights = [weight / total for weight in weights]
    return [(e, w * router.scaling_factor) for e, w in zip(chosen, weights, strict=True)]
