"""What a model takes of memory."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType

from torch import Tensor


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
