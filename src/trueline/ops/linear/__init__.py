"""y = x Wᵀ. `pack(weight [out, in])` once at load, `run(x [n, in], packed)` -> [n, out].

The weight is a `Weight` (weights/value.py), or a tensor, which is its own dense weight. `pack`
calls `dense` where the implementation multiplies with plain numbers; one that keeps quantised
weights as they are stored says which in `keeps`, or in `formats` if it is to be given no others.
The packed form belongs to the implementation; the weight may be freed. One that quantises x too
declares `numerics=("activations",)`; docs/checkpoints.md has its definition.

`run_wide(x, packed)` -> [n, out] in float32, of which logits are made. On a GPU it has the digits
of the sums whatever dtype x has, where `run` rounds them to x's; on a CPU, those of `run`."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from trueline.ops.capabilities import (
    CPU,
    GPU,
    HOPPER_FP8,
    NATIVE_PACKING,
    Capabilities,
    Context,
    Opaque,
)
from trueline.weights.value import Weight

Packed = TypeVar("Packed")


class Linear(Protocol[Packed]):
    capabilities: Capabilities

    def pack(self, weight: Weight | Tensor) -> Packed: ...

    def run(self, x: Tensor, packed: Packed) -> Tensor: ...

    def run_wide(self, x: Tensor, packed: Packed) -> Tensor: ...


LinearOp = Linear[Opaque]
"""The one that the plan chose, as other ops and the layers get it."""


def _onednn_refusals(context: Context) -> list[str]:
    from trueline.ops.linear import onednn  # which asks its library

    return onednn.refusals(context)


IMPLEMENTATIONS = {
    "native": NATIVE_PACKING,
    "onednn": Capabilities(devices=("cpu",), batch_invariant=True, refuses=_onednn_refusals),
    "torch_mm": CPU,
    "fp8_inputs": replace(CPU, numerics=("activations",)),
    "reference": CPU,
    "hopper_fp8": HOPPER_FP8,
    "triton_quantised": replace(GPU, formats=("block fp8", "int4", "fp4")),
    "triton": GPU,
    "cublas": GPU,
}
"""In the order of preference. Batch invariance is probed before it is believed (plan/select.py)."""
LIBRARIES = ("onednn", "torch_mm", "cublas")
"""Those whose sums are a library's: whether a row's bits depend on other rows depends on it and on
the machine. Of all others it is up to us."""
