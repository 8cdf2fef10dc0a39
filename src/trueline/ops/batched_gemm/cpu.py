from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.ops.batched_gemm import IMPLEMENTATIONS
from trueline.ops.capabilities import Opaque
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["cpu"]


@dataclass(frozen=True, slots=True)
class Packed:
    weight: Tensor
    linear: LinearOp
    heads: list[Opaque] | None
    """The bits of a batched GEMM depend on a row's place; those of one GEMM per head do not."""


def pack(weight: Weight | Tensor, linear: LinearOp, batch_invariant: bool) -> Packed:
    weight = dense(weight)
    return Packed(
        weight, linear, [linear.pack(head) for head in weight] if batch_invariant else None
    )


def run(x: Tensor, packed: Packed, to: Tensor | None = None) -> Tensor:
    y = _product(x, packed)
    return y if to is None else to.copy_(y)


def _product(x: Tensor, packed: Packed) -> Tensor:
    if packed.heads is not None:
        parts = [packed.linear.run(x[:, h], head) for h, head in enumerate(packed.heads)]
        return torch.stack(parts, dim=1)
    if len(x) <= 4:  # a handful of rows run faster with the weight on the left
        return torch.bmm(packed.weight, x.permute(1, 2, 0)).permute(2, 0, 1)
    return torch.bmm(x.transpose(0, 1), packed.weight.mT).transpose(0, 1)
