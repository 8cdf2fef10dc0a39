"""down(silu(gate x) × up x): `pack(gate_up [2 width, hidden], down [hidden, width], linear,
limit=None)` once; `run(x [n, hidden], packed, linear)` -> [n, hidden]. With a `limit`, before silu,
the gate is clamped to it from above, and up to ± it.

The same in two steps, for a rank that holds a part of the width and, of `down`, some rows over the
whole width: `middle(x, packed, linear)` -> [n, part]; `down(all [n, width], packed, linear)` ->
[n, rows]. With everything here the two give the bits of `run`. `middle` may have more digits than
x; `down` then returns them. Only batch-invariant mode calls the two."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from trueline.ops.capabilities import (
    CPU,
    GPU,
    HOPPER_FP8,
    NATIVE_PACKING,
    NUMERICS,
    Capabilities,
)
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

Packed = TypeVar("Packed")


class MLP(Protocol[Packed]):
    capabilities: Capabilities

    def pack(
        self,
        gate_up: Weight | Tensor,
        down: Weight | Tensor,
        linear: LinearOp,
        limit: float | None = None,
    ) -> Packed: ...

    def run(self, x: Tensor, packed: Packed, linear: LinearOp) -> Tensor: ...


class InvariantMLP(MLP[Packed], Protocol[Packed]):
    """What a batch-invariant implementation has too."""

    def middle(self, x: Tensor, packed: Packed, linear: LinearOp) -> Tensor: ...

    def down(self, middle: Tensor, packed: Packed, linear: LinearOp) -> Tensor: ...


IMPLEMENTATIONS = {
    "native": NATIVE_PACKING,
    "cpu": replace(CPU, numerics=NUMERICS),
    "reference": CPU,
    "hopper_fp8": HOPPER_FP8,
    "triton": replace(GPU, numerics=NUMERICS),
}
