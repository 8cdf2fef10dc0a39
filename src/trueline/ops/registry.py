"""Every op and its implementations, in the order of preference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from trueline.cache.layout import IndexLayout
from trueline.plugins import Registry

OPS: dict[str, tuple[str, ...]] = {
    "linear": ("native", "onednn", "torch_mm", "reference", "triton", "cublas"),
    "head_product": ("native", "cpu", "reference", "triton", "cublas"),
    "mlp": ("native", "cpu", "reference", "triton"),
    "rms_norm": ("native", "cpu", "reference", "triton"),
    "rope": ("native", "cpu", "reference", "triton"),
    "latent_write": ("parts", "reference", "triton"),
    "mla_decode": ("native", "cpu", "reference", "triton"),
    "mla_prefill": ("cpu", "reference", "triton"),
    "lightning": ("cpu", "reference", "triton"),
    "index_write": ("parts", "reference", "triton"),
    "linear_inputs": ("parts", "reference", "triton"),
    "gated_norm": ("parts", "reference", "triton"),
    "index_scores": ("native", "cpu", "reference", "triton"),
    "top_positions": ("native", "cpu", "reference", "triton"),
    "sparse_mla": ("native", "cpu", "reference", "triton"),
    "route": ("native", "cpu", "reference", "triton"),
    "experts": ("native", "cpu", "reference", "triton"),
    "sampling": ("cpu", "reference", "triton"),
}
"""Ours; packages may add more."""

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("pack", "run"),
    "head_product": ("pack", "run"),
    "mlp": ("pack", "run", "middle", "down"),
    "rms_norm": ("run", "run_sum"),
    "rope": ("run",),
    "latent_write": ("run",),
    "mla_decode": ("prepare", "run"),
    "mla_prefill": ("run",),
    "lightning": ("prepare", "decode", "prefill"),
    "index_write": ("run", "turn"),
    "linear_inputs": ("run",),
    "gated_norm": ("run",),
    "index_scores": ("prepare", "run"),
    "top_positions": ("run",),
    "sparse_mla": ("prepare", "run"),
    "route": ("run",),
    "experts": ("pack", "run", "each", "combine"),
    "sampling": ("sample", "score"),
}

INVARIANT_ONLY = {"mlp": ("middle", "down"), "experts": ("each", "combine")}
"""Functions that only batch-invariant mode calls: ours for GPUs, which refuse it, have none."""

GPU_NAMES = ("cublas", "triton")
"""Of our implementations, those for an NVIDIA GPU; all others are for CPUs. Packages' objects say
it by their `devices`, and are for CPUs where they have none."""

REGISTRY = Registry(
    "trueline.ops",
    "op",
    {f"{op}.{name}": f"trueline.ops.{op}.{name}" for op, names in OPS.items() for name in names},
    FUNCTIONS,
)


Need = Literal["states", "indexer"]
NEEDS: dict[str, Need] = {
    "lightning": "states",
    "index_write": "indexer",
    "linear_inputs": "states",
    "gated_norm": "states",
    "index_scores": "indexer",
    "top_positions": "indexer",
    "sparse_mla": "indexer",
}
"""Ops that only some models use, and what these have."""


def refusals(op: str, name: str, dtype: torch.dtype, *, batch_invariant: bool = False) -> list[str]:
    """Why an implementation cannot run on this CPU; most can."""
    elsewhere = other_device(op, name, "cpu")
    return elsewhere or reasons(implementation(op, name), dtype, batch_invariant)


def other_device(op: str, name: str, device: str) -> list[str]:
    """Told without importing ours: what is for a GPU may need what only such machines have."""
    if REGISTRY.package(op, name):
        devices: Sequence[str] = getattr(implementation(op, name), "devices", ("cpu",))
    else:
        devices = ("cuda",) if name in GPU_NAMES else ("cpu",)
    return [] if device in devices else [f"runs on {' and '.join(devices)}"]


def reasons(
    found: Any, dtype: torch.dtype, batch_invariant: bool, layout: IndexLayout | None = None
) -> list[str]:
    """What an op's or a layer's own `refusals`, if it has any, say; and its `layout_refusals` of
    the index cache."""
    told: list[str] = found.refusals(dtype, batch_invariant) if hasattr(found, "refusals") else []
    if layout is not None and hasattr(found, "layout_refusals"):
        told = [*told, *found.layout_refusals(layout)]
    return told


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Our implementations that run here, in the order of preference."""
    return [name for name in OPS[op] if not refusals(op, name, dtype)]


def implementation(op: str, name: str) -> Any:
    """A module, or whatever else has the op's functions."""
    return REGISTRY.get(op, name)
