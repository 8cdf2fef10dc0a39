"""For tests that run every implementation of an op but its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trueline.ops.registry import OPS, implementation, refusals


def every(op: str) -> Any:
    """The test gets each as `module`."""
    return pytest.mark.parametrize("module", [name for name in OPS[op] if name != "reference"])


def runnable(op: str, name: str) -> Any:
    refused = refusals(op, name, torch.float32)
    if refused:
        pytest.skip(f"refused here: {refused}")
    return implementation(op, name)
