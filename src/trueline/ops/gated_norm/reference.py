"""Group by group, in float64, rounded where the contract says."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.ops.gated_norm import IMPLEMENTATIONS
from trueline.ops.latent_write import Parts

capabilities = IMPLEMENTATIONS["reference"]


def run(
    x: Tensor, gate: Tensor, *, weight: Tensor, groups: int, eps: float, parts: Parts
) -> Tensor:
    width = x.shape[1] // groups
    out = torch.empty(x.shape, dtype=torch.float64)
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        numbers = x[:, part].double()
        numbers = numbers / torch.sqrt((numbers * numbers).mean(-1, keepdim=True) + eps)
        scaled = (numbers.to(x.dtype).double() * weight[part].double()).to(x.dtype).double()
        opened = (1 / (1 + torch.exp(-gate[:, part].double()))).to(x.dtype).double()
        out[:, part] = scaled * opened
    return out.to(x.dtype)
