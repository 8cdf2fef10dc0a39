"""What a model takes of memory: its tensors, and this process while it loads them."""

from __future__ import annotations

import gc
from pathlib import Path
from types import FunctionType, ModuleType

from torch import Tensor

STATUS = Path("/proc/self/status")


def tensor_bytes(root: object) -> int:
    """Of all tensors that an object holds, in whatever it holds; memory that several share counts
    once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, ModuleType | type | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            left += gc.get_referents(each)
    return sum(found.values())


def resident_bytes() -> int | None:
    """Of this process in host memory, now; None where the system does not tell."""
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """The most that it had there at any time."""
    return _status("VmHWM")


def _status(key: str) -> int | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
