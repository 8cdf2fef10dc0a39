# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""How Triton kernels follow each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trueline.device import launches_early

EARLY = tl.constexpr(launches_early())
"""Whether kernels are set up while those before them still run (NVIDIA, from Hopper on)."""


def kernel(fn: Any = None, **options: Any) -> Any:
    """`triton.jit` for what is launched by itself. It calls `wait_turn()`, once, and first of all:
    only weights may be loaded before."""
    if fn is None:
        return partial(kernel, **options)
    made = triton.jit(fn, **options)
    return _Early(made) if EARLY.value else made


class _Early:
    def __init__(self, made: Any) -> None:
        self.made = made

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.made[grid], launch_pdl=True)


@triton.jit
def wait_turn(SHARED: tl.constexpr = True):
    """Nothing that any kernel writes is read or written before: it may still be at it. Whatever
    follows a kernel that is not SHARED comes when it is done: it is not squeezed in between."""
    if EARLY:
        gdc_wait()
        if SHARED:
            gdc_launch_dependents()
