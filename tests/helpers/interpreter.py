"""Triton's interpreter, mended: what numpy no longer takes, casts of narrow floats, and what it
does again for every call.

Imported by conftest.py before anything imports our kernels.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from functools import cache
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_get_np_dtype = interpreter._get_np_dtype
_init_block_type = tl.block_type.__init__
_init_tensor = tl.tensor.__init__
_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor


class _Launch:
    """The launch that is being interpreted, if any: its scope, and the modules patched for it."""

    scope: Any = None
    modules: frozenset[str] = frozenset()


@cache
def _modules(function: Any) -> frozenset[str]:
    values = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(value.__name__ for value in values if value in (tl, tl.core))


def _patch_once(function: Any) -> Any:
    """The interpreter patches `triton.language` again whenever one jitted function calls another,
    which is half of its time; once a launch is enough."""
    wanted = _modules(function)
    if _Launch.scope is None:
        scope = _patch_lang(function)
        restore = scope.restore

        def end() -> None:
            _Launch.scope = None
            restore()

        scope.restore = end
        _Launch.scope, _Launch.modules = scope, wanted
        return scope
    if not wanted <= _Launch.modules:
        _Launch.scope._changes += _patch_lang(function)._changes
        _Launch.modules |= wanted
    return interpreter._LangPatchScope()


def _patch_index(tensor: Any, scope: Any) -> None:
    """Its scalars are arrays of one number, which numpy takes for an index no longer."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


FLOATS = {
    "fp8e4nv": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _convert_float(data: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Its own casts of narrow floats neither round to even nor carry into the exponent."""
    numbers = torch.from_numpy(np.ascontiguousarray(data)).view(FLOATS[given.name])
    made = numbers.to(FLOATS[wanted.name])
    return made.view(UNSIGNED[made.itemsize]).numpy()


_NUMPY: dict[str, Any] = {}
_BLOCKS: dict[tuple[str, Any], Any] = {}
_SHAPES: dict[str, Any] = {}


def _numpy_dtype(wanted: Any) -> Any:
    """It makes a table of all dtypes for every look-up."""
    found = _NUMPY.get(wanted.name)
    if found is None:
        found = _NUMPY[wanted.name] = _get_np_dtype(wanted)
    return found


def _new_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """It checks each shape, and names it and its numbers, as often as it is used."""
    key = element_ty.name, tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    found = _BLOCKS.get(key)
    if found is None:
        _init_block_type(self, element_ty, shape)
        _BLOCKS[key] = self.shape, self.numel, self.name
    else:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found


def _new_tensor(self: Any, handle: Any, type: Any) -> None:
    """It makes a constant of each number of a shape for every tensor."""
    found = _SHAPES.get(type.name)
    if found is None:
        _init_tensor(self, handle, type)
        _SHAPES[type.name] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found


tl.block_type.__init__ = _new_block_type
tl.tensor.__init__ = _new_tensor
builder = interpreter.interpreter_builder
# it computes whether whole numbers overflow and looks at the outcome in debug mode only
builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
interpreter._get_np_dtype = _numpy_dtype
interpreter._convert_float = _convert_float
interpreter._patch_lang_tensor = _patch_index
interpreter._patch_lang = _patch_once
