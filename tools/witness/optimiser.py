"""Muon for the matrices inside the model, AdamW for the rest; flat, then a cosine."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

FLAT, LAST = 0.3, 0.03
"""Share of the steps at the full learning rate; what is left of it at the end."""
NOT_MUON = ("embed_tokens", "lm_head", "mlp.gate.", "indexer", "position_bias")


def schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 50)
    progress = max(0.0, (step / steps - FLAT) / (1 - FLAT))
    return warm * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * progress)))


def orthogonal(g: Tensor) -> Tensor:
    """[n, rows, columns]: about the nearest orthogonal matrix of each (Newton-Schulz)."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Muon:
    def __init__(
        self, parameters: list[nn.Parameter], rate: float, decay: float, slower: dict[int, float]
    ) -> None:
        """`slower`: as the modules give it."""
        self.rate, self.decay, self.slower = rate, decay, slower
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape[-2:]].append(parameter)
        self.groups = list(groups.values())
        self.momenta = [
            torch.cat([torch.zeros_like(p.data.view(-1, *p.shape[-2:])) for p in group])
            for group in self.groups
        ]

    @torch.no_grad()
    def step(self, factor: Tensor) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            g = torch.cat([p.grad.view(-1, *p.shape[-2:]) for p in group])  # type: ignore[union-attr]
            momentum.lerp_(g, 0.05)
            update = orthogonal(g.lerp(momentum, 0.95)).float()
            rows, columns = update.shape[-2:]
            rate = self.rate * max(1.0, rows / columns) ** 0.5
            sizes = [p.numel() // (rows * columns) for p in group]
            for p, u in zip(group, update.split(sizes), strict=True):
                p.mul_(1 - self.rate * factor * self.decay)
                p.sub_(u.view_as(p) * (rate * self.slower.get(id(p), 1.0) * factor))


class Optimiser:
    """The schedule's factor is a number on the device, so that a captured step follows it."""

    def __init__(self, model: nn.Module, muon: float, adam: float) -> None:
        inner, outer = [], []
        for name, parameter in model.named_parameters():
            matrix = parameter.ndim >= 2 and not any(part in name for part in NOT_MUON)
            (inner if matrix else outer).append(parameter)
        slower: dict[int, float] = {}
        for module in model.modules():
            if hasattr(module, "slower"):
                slower |= module.slower()
        self.muon = Muon(inner, muon, 0.02, slower)
        device, on_gpu = outer[0].device, outer[0].is_cuda
        self.factor, self.adam_rate = torch.ones((), device=device), adam
        self.rate = torch.full((), adam, device=device)
        self.adam = torch.optim.AdamW(outer, lr=self.rate, betas=(0.9, 0.98), weight_decay=0.01,
                                      fused=on_gpu, capturable=on_gpu)  # fmt: skip

    def set(self, step: int, steps: int) -> None:
        self.factor.fill_(schedule(step, steps))
        self.rate.fill_(self.adam_rate * schedule(step, steps))

    def step(self) -> None:
        self.adam.step()
        self.muon.step(self.factor)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameters in (*self.muon.groups, self.adam.param_groups[0]["params"]):
            for parameter in parameters:
                parameter.grad = None
