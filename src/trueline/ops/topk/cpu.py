from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.topk import IMPLEMENTATIONS

capabilities = IMPLEMENTATIONS["cpu"]


def run(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    places = torch.arange(topk)
    out = torch.where(places < lengths[:, None], places, -1)
    (long,) = torch.nonzero(lengths > topk, as_tuple=True)
    if len(long):
        out[long] = _largest(scores[long], lengths[long], topk)
    return out


def _largest(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    unseen = torch.arange(scores.shape[1]) >= lengths[:, None]
    values = scores.masked_fill(unseen | scores.isnan(), float("-inf"))
    # torch's choice among equal scores is undefined: only the k-th value is taken from it
    last = values.topk(topk).values[:, -1:]
    above, equal = values > last, values == last
    places_left = topk - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= places_left))
    return chosen.nonzero()[:, 1].view(len(scores), topk)
