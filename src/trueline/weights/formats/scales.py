"""What every format asks of its scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.errors import CheckpointError
from trueline.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


def check_scales(tensor: StoredTensor, scales: Tensor) -> None:
    if not bool(scales.isfinite().all()) or bool((scales <= 0).any()):
        raise CheckpointError(f"{tensor}: accepted: positive, finite scales")
