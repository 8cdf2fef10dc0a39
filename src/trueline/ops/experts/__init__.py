"""Routed experts: `pack(gate_up [experts, 2 width, hidden], down [experts, hidden, width], linear,
limit=None)` once; `run(x [n, hidden], ids [n, k], weights [n, k], packed, linear, first=0)` ->
[n, hidden]. This rank holds experts first..first+len(packed); the others' share is left out. Each
active expert's weights are read once, whatever the number of tokens. `limit`: as of the op mlp, for
every expert, shared ones among them.

The same in three steps, for a rank that holds some of the experts, or of every expert a part of the
width and, of `down`, some rows over the whole width: `middle(x, ids, packed, linear, first=0)` ->
[n, k, part] of each of a token's experts; `down(all [n, k, width], ids, packed, linear, first=0)`
-> [n, k, rows]; both have zeros for experts of other ranks. `combine(each [n, k, rows], weights)`
-> [n, rows]. With everything here the three give the bits of `run`. `middle` may have more digits
than x; the others then return them. Only batch-invariant mode calls the three.

An implementation may also take the shared expert in, where its width is a multiple of the others':
`pack_with_shared(gate_up, down, shared_gate_up [2 shared, hidden], shared_down [hidden, shared],
linear, limit=None)` in place of `pack`; `run` then adds what it gives, with weight 1. Or
`run_added(x, ids, weights, more, packed, linear, first=0)`: what `run` gives plus another [n,
hidden], rounded once. `more()` is called once what is small is launched, and may begin to compute
beside what follows; what it returns is called before the sum, and gives the tensor. Layers use
either where it is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import Tensor

from trueline.ops.capabilities import (
    CPU,
    GPU,
    HOPPER_FP8,
    HOPPER_W4A16,
    NATIVE_PACKING,
    NUMERICS,
    Capabilities,
)
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

Packed = TypeVar("Packed")


class Experts(Protocol[Packed]):
    capabilities: Capabilities

    def pack(
        self,
        gate_up: Weight | Tensor,
        down: Weight | Tensor,
        linear: LinearOp,
        limit: float | None = None,
    ) -> Packed: ...

    def run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        packed: Packed,
        linear: LinearOp,
        first: int = 0,
    ) -> Tensor: ...


class InvariantExperts(Experts[Packed], Protocol[Packed]):
    """What a batch-invariant implementation has too."""

    def middle(
        self, x: Tensor, ids: Tensor, packed: Packed, linear: LinearOp, first: int = 0
    ) -> Tensor: ...

    def down(
        self, middle: Tensor, ids: Tensor, packed: Packed, linear: LinearOp, first: int = 0
    ) -> Tensor: ...

    def combine(self, each: Tensor, weights: Tensor) -> Tensor: ...


class SharedExperts(Experts[Packed], Protocol[Packed]):
    """Optional, declared as `pack_with_shared`."""

    def pack_with_shared(
        self,
        gate_up: Weight | Tensor,
        down: Weight | Tensor,
        shared_gate_up: Weight | Tensor,
        shared_down: Weight | Tensor,
        linear: LinearOp,
        limit: float | None = None,
    ) -> Packed: ...


class AddingExperts(Experts[Packed], Protocol[Packed]):
    """Optional, declared as `run_added`."""

    def run_added(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        more: Callable[[], Callable[[], Tensor]],
        packed: Packed,
        linear: LinearOp,
        first: int = 0,
    ) -> Tensor: ...


IMPLEMENTATIONS = {
    "native": NATIVE_PACKING,
    "cpu": replace(CPU, numerics=NUMERICS),
    "reference": CPU,
    "hopper_fp8": replace(HOPPER_FP8, optional=("pack_with_shared",)),
    "hopper_w4a16": replace(HOPPER_W4A16, optional=("run_added",)),
    "triton_quantised": replace(
        GPU, formats=("block fp8", "int4", "fp4"), optional=("pack_with_shared", "run_added")
    ),
    "triton": replace(GPU, optional=("pack_with_shared", "run_added")),
}
