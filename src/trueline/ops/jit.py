# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How Triton kernels are compiled and launched; in a dry run, only recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Protocol, overload, runtime_checkable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.device import interpreting, supports_pdl
from trueline.ops.launch import KNOWN_MULTIPLE

PDL = tl.constexpr(supports_pdl())
"""Programmatic dependent launch: a kernel may start before the previous one ends, up to the point
where it waits for that one's writes (NVIDIA, from Hopper on)."""


Ask = tuple[object, ...]
"""For a kernel, as it would be compiled for the arguments of a launch."""


class Param(Protocol):
    """Of a compiled function."""

    is_constexpr: bool
    do_not_specialize: bool
    do_not_specialize_on_alignment: bool


@runtime_checkable
class Described(Protocol):
    """A tensor as TMA copies it: Gluon's class, which is not everywhere."""

    base: Tensor
    block_shape: list[int]
    layout: object


class Launchable(Protocol):
    """Launched with `[grid](…)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


class Jitted(Launchable, Protocol):
    """What `triton.jit` and `gluon.jit` make."""

    params: Sequence[Param]

    def run(self, *given: object, grid: None, warmup: bool, **options: object) -> object: ...


class Launcher:
    """A kernel of Triton or Gluon, to be launched with `[grid]`."""

    dry_run: ClassVar[Callable[[Ask, Callable[[], object]], None] | None] = None
    """During a dry run nothing is launched: this gets what is asked for, and how to compile it."""

    def __init__(self, made: Jitted, **options: object) -> None:
        self.made, self.options = made, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        if Launcher.dry_run is not None:
            return self._ask
        return partial(self.made[grid], **self.options)

    def _ask(self, *given: object, **named: object) -> None:
        assert Launcher.dry_run is not None
        each = zip(self.made.params, given, strict=False)
        ask = (self.made, *(_compiled_for(*pair) for pair in each), *sorted(named.items()))
        options = self.options | named
        Launcher.dry_run(ask, lambda: self.made.run(*given, grid=None, warmup=True, **options))


def _compiled_for(param: Param, value: object) -> object:
    """What Triton knows of an argument: of pointers and whole numbers, whether they are multiples
    of 16, and whether a number is 1."""
    if param.is_constexpr or value is None:
        return value
    aligned = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    if isinstance(value, Described):
        return value.base.dtype, tuple(value.block_shape), value.layout
    if isinstance(value, Tensor):
        return value.dtype, aligned and value.data_ptr() % KNOWN_MULTIPLE == 0
    if isinstance(value, int) and not param.do_not_specialize:
        return value == 1, aligned and value % KNOWN_MULTIPLE == 0, abs(value) >> 31 > 0
    return type(value)


@contextmanager
def dry_run(asked: Callable[[Ask, Callable[[], object]], None]) -> Iterator[None]:
    Launcher.dry_run = asked
    try:
        yield
    finally:
        Launcher.dry_run = None


@overload
def kernel(fn: Callable[..., None], **options: object) -> Launchable: ...
@overload
def kernel(fn: None = None, **options: object) -> Callable[[Callable[..., None]], Launchable]: ...
def kernel(
    fn: Callable[..., None] | None = None, **options: object
) -> Launchable | Callable[[Callable[..., None]], Launchable]:
    """`triton.jit` for what is launched by itself. It calls `pdl_wait()`, once, and first of all:
    only weights may be loaded before."""
    if fn is None:
        return partial(kernel, **options)
    made: Jitted = triton.jit(fn, **options)
    if interpreting():
        return made
    return Launcher(made, launch_pdl=True) if PDL.value else Launcher(made)


@triton.jit
def pdl_wait(SHARED: tl.constexpr = True):
    """Waits for the kernels before: what any kernel writes is neither read nor written earlier. A
    SHARED kernel then lets the next one start beside it; the next one after any other kernel starts
    when that has ended."""
    if PDL:
        gdc_wait()
        if SHARED:
            gdc_launch_dependents()
