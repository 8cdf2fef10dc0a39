"""Every op and its implementations, in the order of preference."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from trueline.errors import UsageError, did_you_mean

OPS: dict[str, tuple[str, ...]] = {
    "linear": ("onednn", "torch_mm", "reference"),
    "rms_norm": ("cpu", "reference"),
    "rope": ("cpu", "reference"),
    "mla_decode": ("cpu", "reference"),
    "mla_prefill": ("cpu", "reference"),
    "route": ("cpu", "reference"),
    "experts": ("cpu", "reference"),
    "sampling": ("cpu", "reference"),
}


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
