"""Every op and its implementations, in the order of preference."""

from __future__ import annotations

from typing import Any

import torch

from trueline.plugins import Registry

OPS: dict[str, tuple[str, ...]] = {
    "linear": ("native", "onednn", "torch_mm", "reference"),
    "head_product": ("native", "cpu", "reference"),
    "mlp": ("native", "cpu", "reference"),
    "rms_norm": ("native", "cpu", "reference"),
    "rope": ("native", "cpu", "reference"),
    "mla_decode": ("native", "cpu", "reference"),
    "mla_prefill": ("cpu", "reference"),
    "lightning": ("cpu", "reference"),
    "route": ("native", "cpu", "reference"),
    "experts": ("native", "cpu", "reference"),
    "sampling": ("cpu", "reference"),
}
"""Ours; packages may add more."""

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("pack", "run"),
    "head_product": ("pack", "run"),
    "mlp": ("pack", "run"),
    "rms_norm": ("run",),
    "rope": ("run",),
    "mla_decode": ("prepare", "run"),
    "mla_prefill": ("run",),
    "lightning": ("prepare", "decode", "prefill"),
    "route": ("run",),
    "experts": ("pack", "run"),
    "sampling": ("sample", "score"),
}

REGISTRY = Registry(
    "trueline.ops",
    "op",
    {f"{op}.{name}": f"trueline.ops.{op}.{name}" for op, names in OPS.items() for name in names},
    FUNCTIONS,
)


def refusals(op: str, name: str, dtype: torch.dtype, *, batch_invariant: bool = False) -> list[str]:
    """Why an implementation cannot run here; most can everywhere."""
    return reasons(implementation(op, name), dtype, batch_invariant)


def reasons(found: Any, dtype: torch.dtype, batch_invariant: bool) -> list[str]:
    """What an op's or a layer's own `refusals`, if it has any, say."""
    told: list[str] = found.refusals(dtype, batch_invariant) if hasattr(found, "refusals") else []
    return told


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Our implementations that run here, in the order of preference."""
    return [name for name in OPS[op] if not refusals(op, name, dtype)]


def implementation(op: str, name: str) -> Any:
    """A module, or whatever else has the op's functions."""
    return REGISTRY.get(op, name)
