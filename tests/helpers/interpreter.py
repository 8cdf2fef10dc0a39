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
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_broadcast_impl_value = TritonSemantic.broadcast_impl_value
_cast = TritonSemantic.cast
_check_types = TritonSemantic.binary_op_type_checking_impl
_computation_type = TritonSemantic.computation_type_impl
_dtype_eq = tl.dtype.__eq__
_get_np_dtype = interpreter._get_np_dtype
_init_block_type = tl.block_type.__init__
_init_tensor = tl.tensor.__init__
_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor
_to_tensor = TritonSemantic.to_tensor
_unwrap = tl.core._unwrap_if_constexpr


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
        self.of_element = {}
        _BLOCKS[key] = self.shape, self.numel, self.name, self.of_element
    else:
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_element = found


def _with_element_ty(self: Any, scalar_ty: Any) -> Any:
    """A type is never changed: one for each element is enough."""
    found = self.of_element.get(scalar_ty.name)
    if found is None:
        found = self.of_element[scalar_ty.name] = tl.block_type(scalar_ty, self.shape)
    return found


def _new_tensor(self: Any, handle: Any, type: Any) -> None:
    """It makes a constant of each number of a shape for every tensor."""
    found = _SHAPES.get(type.name)
    if found is None:
        _init_tensor(self, handle, type)
        _SHAPES[type.name] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found


@cache
def _builtins(package: Any, builder: Any) -> dict[str, Any]:
    """It looks through a package's members at every launch. First asked before any is patched."""
    semantic = TritonSemantic(builder)

    def interpreted(member: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    members = inspect.getmembers(package, tl.core.is_builtin)
    return {name: interpreted(member) for name, member in members}


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, call in _builtins(package, builder).items():
        scope.set_attr(package, name, call)


# What follows answers the usual case at once and leaves every other to Triton.


def _same_dtype(self: Any, other: Any) -> Any:
    return self is other or _dtype_eq(self, other)


def _same_tuple(self: Any, other: Any) -> Any:
    """It makes a tuple of the other for every comparison; a shape's numbers are all that count."""
    values = other.values if isinstance(other, tl.tuple) else list(other)
    return tl.constexpr(self.values == [_unwrap_constexpr(value) for value in values])


def _unwrap_constexpr(value: Any) -> Any:
    return value if type(value) in (int, float, bool, tl.dtype, tl.tensor) else _unwrap(value)


def _tensor_of(self: Any, x: Any, check_type: bool = True) -> Any:
    return x if type(x) is tl.tensor else _to_tensor(self, x, check_type)


def _cast_to(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
    if input.type.scalar is dst_ty.scalar:
        return input
    return _cast(self, input, dst_ty, fp_downcast_rounding)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
    if left is right or (left and right and left.values == right.values):
        return lhs, rhs
    return _broadcast_impl_value(self, lhs, rhs)


def _splat(self: Any, ret_ty: Any, arg: Any) -> Any:
    """It has numpy read the shape number by number."""
    made = np.empty(ret_ty.shape.values, _numpy_dtype(arg.dtype))
    made[...] = arg.data.reshape(-1)[0]
    return interpreter.TensorHandle(made, arg.dtype.scalar)


_COMPUTED: dict[tuple[str, bool, str, bool, bool], Any] = {}


def _computed_in(
    self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
) -> Any:
    key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
    found = _COMPUTED.get(key)
    if found is None:
        found = _computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        _COMPUTED[key] = found
    return found


_CONSTANTS: dict[tuple[Any, ...], Any] = {}
_MOST_NUMBERS = 1 << 14
"""Of a constant that is kept."""


def _checked(self: Any, lhs: Any, rhs: Any, *how: bool) -> Any:
    """Two tensors of one dtype, neither of them pointers, are computed in it unless they are
    divided. A number beside a tensor that stays as it is becomes the same tensor every time."""
    left, right = type(lhs), type(rhs)
    if left is right is tl.tensor:
        scalar = lhs.type.scalar
        if scalar is rhs.type.scalar and not any(how[3:]) and not scalar.is_ptr():
            return _broadcast(self, lhs, rhs)
        return _check_types(self, lhs, rhs, *how)
    key: tuple[Any, ...]
    if left is tl.tensor:
        key = lhs.type.name, right, rhs, how
    elif right is tl.tensor:
        key = left, lhs, rhs.type.name, how
    else:
        return _check_types(self, lhs, rhs, *how)
    kept = _CONSTANTS.get(key)
    if kept is not None:
        return (lhs, kept) if left is tl.tensor else (kept, rhs)
    ours, theirs = _check_types(self, lhs, rhs, *how)
    made, stays = (theirs, ours is lhs) if left is tl.tensor else (ours, theirs is rhs)
    if stays and made.handle.data.size <= _MOST_NUMBERS:
        made.handle.data.flags.writeable = False
        _CONSTANTS[key] = made
    return ours, theirs


_WHOLE = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
tl.dtype.is_int = lambda self: self.name in _WHOLE
tl.dtype.__eq__ = _same_dtype
tl.tuple.__eq__ = _same_tuple
tl.core._unwrap_if_constexpr = _unwrap_constexpr
TritonSemantic.to_tensor = _tensor_of
TritonSemantic.cast = _cast_to
TritonSemantic.broadcast_impl_value = _broadcast
TritonSemantic.computation_type_impl = _computed_in
TritonSemantic.binary_op_type_checking_impl = _checked
interpreter.InterpreterBuilder.create_splat = _splat
interpreter._patch_builtin = _patch_builtin
tl.block_type.__init__ = _new_block_type
tl.block_type.with_element_ty = _with_element_ty
tl.tensor.__init__ = _new_tensor
builder = interpreter.interpreter_builder
# it computes whether whole numbers overflow and looks at the outcome in debug mode only
builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
interpreter._get_np_dtype = _numpy_dtype
interpreter._convert_float = _convert_float
interpreter._patch_lang_tensor = _patch_index
interpreter._patch_lang = _patch_once
