"""An MLP that leaves its products to `linear` has the numerics of `linear`."""

from __future__ import annotations

import pytest
import torch

from trueline.device import interpreting
from trueline.ops.registry import implementation
from trueline.verify.ops import FP8_CHECKS

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels run on a CPU only interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mlp(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows: the largest numbers of more are no numbers of float16."""
    monkeypatch.setattr("trueline.verify.ops.fp8_inputs.MLP_ROWS", (1, 9))
    FP8_CHECKS["mlp"][0].run(implementation("mlp", "triton"), dtype)
