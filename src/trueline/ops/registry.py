"""Every op and its implementations, in the order of preference."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from trueline.errors import UsageError, did_you_mean

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


def refusals(op: str, name: str, dtype: torch.dtype) -> list[str]:
    """Why an implementation cannot run here; most can everywhere."""
    module = implementation(op, name)
    reasons: list[str] = module.refusals(dtype) if hasattr(module, "refusals") else []
    return reasons


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Implementations that run here, in the order of preference."""
    return [name for name in OPS[op] if not refusals(op, name, dtype)]


def implementation(op: str, name: str) -> ModuleType:
    check_name(op, name)
    return import_module(f"trueline.ops.{op}.{name}")


def check_name(op: str, name: str) -> None:
    if op not in OPS:
        raise UsageError(f"op '{op}': accepted: {', '.join(OPS)}{did_you_mean(op, OPS)}")
    if name not in OPS[op]:
        raise UsageError(
            f"ops: '{op}' has no implementation '{name}'; accepted: "
            f"{', '.join(OPS[op])}{did_you_mean(name, OPS[op])}"
        )
