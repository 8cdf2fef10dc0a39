from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from trueline.ops import invariant_math
from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.ops.route import IMPLEMENTATIONS, pack
from trueline.ops.route import logits as router_logits
from trueline.spec.feedforward import RouterSpec, Scoring

__all__ = ["capabilities", "choose", "pack", "run"]

capabilities = IMPLEMENTATIONS["cpu"]

SCORES: Mapping[Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": invariant_math.sigmoid,
    "sqrtsoftplus": invariant_math.sqrtsoftplus,
}


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
    scores = SCORES[router.scoring](logits)
    ids = forced if forced is not None else _choose(scores, bias, router)
    weights = scores.gather(1, ids)
    if router.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * router.scaling_factor


def _choose(scores: Tensor, bias: Tensor | None, router: RouterSpec) -> Tensor:
    choice = scores if bias is None else scores + bias
    if router.num_groups > 1:
        choice = _limit_groups(choice, router)
    return _top(choice, router.top_k)


def _top(values: Tensor, count: int) -> Tensor:
    """torch.topk promises no order among equals; a stable sort does."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _limit_groups(choice: Tensor, router: RouterSpec) -> Tensor:
    groups = choice.view(len(choice), router.num_groups, -1)
    if router.group_score == "max":
        strength = groups.amax(-1)
    else:
        strength = groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(strength, dtype=torch.bool)
    kept.scatter_(1, _top(strength, router.top_groups), True)
    return groups.masked_fill(~kept[..., None], float("-inf")).view_as(choice)
