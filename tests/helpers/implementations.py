"""For tests that run every implementation of an op on this CPU but its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from trueline import native
from trueline.device import interpreting
from trueline.ops.capabilities import Context
from trueline.ops.registry import OPS, capabilities, implementation, refusals
from trueline.verify.ops import lightning


def every(op: str) -> Any:
    """The test gets each as `module`."""
    ours = [
        name
        for name in OPS[op]
        if name != "reference"
        and "cpu" in capabilities(op, name).devices
        and "weights" in capabilities(op, name).numerics
    ]
    return pytest.mark.parametrize("module", ours)


def runnable(op: str, name: str) -> Any:
    if name == "triton" and interpreting():
        return implementation(op, name)
    refused = refusals(op, name, Context(dtype=torch.float32))
    if refused:
        pytest.skip(f"refused here: {refused}")
    return implementation(op, name)


def with_threads(run: Callable[[], Tensor]) -> list[Tensor]:
    """What it gives on 1, 2, 3 and 5 threads, PyTorch's and our kernels'."""
    before = torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            native.use_threads(count)
            made.append(run())
    finally:
        torch.set_num_threads(before)
        native.use_threads(before)
    return made


@contextmanager
def lightning_dims(
    monkeypatch: pytest.MonkeyPatch, dk: int, dv: int, room: tuple[int, int] = lightning.ROOM
) -> Iterator[None]:
    """Its checks with other channels than their own, which fill no tile, or other room beside
    them, which is no multiple of anything."""
    kept = (lightning._tokens, lightning._exact)
    with monkeypatch.context() as patched:
        patched.setattr(lightning, "DK", dk)
        patched.setattr(lightning, "DV", dv)
        patched.setattr(lightning, "ROOM", room)
        for cached in kept:
            cached.cache_clear()
        yield
    for cached in kept:
        cached.cache_clear()
