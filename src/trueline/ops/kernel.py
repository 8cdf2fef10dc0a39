# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How Triton kernels are launched, or only asked for, during a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.device import interpreting, launches_early
from trueline.ops.launch import KNOWN_MULTIPLE

EARLY = tl.constexpr(launches_early())
"""Whether kernels are set up while those before them still run (NVIDIA, from Hopper on)."""


Ask = tuple[object, ...]
"""For a kernel, as it would be compiled for the arguments of a launch."""


class Launcher:
    """A kernel of Triton or Gluon, to be launched with `[grid]`."""

    dry_run: ClassVar[Callable[[Ask, Callable[[], Any]], None] | None] = None
    """During a dry run nothing is launched: this gets what is asked for, and how to compile it."""

    def __init__(self, made: Any, **options: Any) -> None:
        self.made, self.options = made, options

    def __getitem__(self, grid: Any) -> Any:
        if Launcher.dry_run is not None:
            return self._ask
        return partial(self.made[grid], **self.options)

    def _ask(self, *given: Any, **named: Any) -> None:
        assert Launcher.dry_run is not None
        each = zip(self.made.params, given, strict=False)
        ask = (self.made, *(_compiled_for(*pair) for pair in each), *sorted(named.items()))
        options = self.options | named
        Launcher.dry_run(ask, lambda: self.made.run(*given, grid=None, warmup=True, **options))


def _compiled_for(param: Any, value: Any) -> object:
    """What Triton knows of an argument: of pointers and whole numbers, whether they are multiples
    of 16, and whether a number is 1."""
    if param.is_constexpr or value is None:
        return value
    aligned = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    if isinstance(value, Tensor):
        return value.dtype, aligned and value.data_ptr() % KNOWN_MULTIPLE == 0
    if isinstance(value, int) and not param.do_not_specialize:
        return value == 1, aligned and value % KNOWN_MULTIPLE == 0, abs(value) >> 31 > 0
    return type(value)


@contextmanager
def dry_run(asked: Callable[[Ask, Callable[[], Any]], None]) -> Iterator[None]:
    Launcher.dry_run = asked
    try:
        yield
    finally:
        Launcher.dry_run = None


def kernel(fn: Any = None, **options: Any) -> Any:
    """`triton.jit` for what is launched by itself. It calls `wait_turn()`, once, and first of all:
    only weights may be loaded before."""
    if fn is None:
        return partial(kernel, **options)
    made = triton.jit(fn, **options)
    if interpreting():
        return made
    return Launcher(made, launch_pdl=True) if EARLY.value else Launcher(made)


@triton.jit
def wait_turn(SHARED: tl.constexpr = True):
    """Nothing that any kernel writes is read or written before: it may still be at it. Whatever
    follows a kernel that is not SHARED comes when it is done: it is not squeezed in between."""
    if EARLY:
        gdc_wait()
        if SHARED:
            gdc_launch_dependents()
