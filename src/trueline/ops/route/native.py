from __future__ import annotations

import torch
from torch import Tensor

from trueline.native import library
from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.ops.route import IMPLEMENTATIONS, pack
from trueline.ops.route import logits as router_logits
from trueline.spec.feedforward import RouterSpec

__all__ = ["capabilities", "choose", "pack", "run"]

capabilities = IMPLEMENTATIONS["native"]

SCORING = {"sigmoid": 0, "softmax": 1, "sqrtsoftplus": 2}
# How many of a group's best scores make its strength.
PAIR = {None: 0, "max": 1, "top2_sum": 2}


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
    logits = logits.contiguous()
    n, experts = logits.shape
    ids = torch.empty(n, router.top_k, dtype=torch.long) if forced is None else forced.contiguous()
    weights = torch.empty(n, router.top_k)
    library().route(
        *(logits.data_ptr(), None if bias is None else bias.data_ptr(), n, experts),
        *(SCORING[router.scoring], router.num_groups, router.top_groups),
        *(PAIR[router.group_score], router.top_k, router.renormalise, router.scaling_factor),
        *(forced is not None, ids.data_ptr(), weights.data_ptr()),
    )
    return ids, weights
