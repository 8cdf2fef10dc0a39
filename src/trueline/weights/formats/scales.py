"""What every format asks of its scales, and how a row's groups are multiplied with theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.errors import CheckpointError
from trueline.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


def check_scales(tensor: StoredTensor, scales: Tensor) -> None:
    if not bool(scales.isfinite().all()) or bool((scales <= 0).any()):
        raise CheckpointError(f"{tensor}: accepted: positive, finite scales")


def groups_of(numbers: slice, group: int) -> slice:
    """The blocks or groups along an axis that these numbers touch."""
    return slice(numbers.start // group, -(-numbers.stop // group))


def times_groups(numbers: Tensor, scales: Tensor, group: int) -> Tensor:
    """In place, each group of a row with its scale; the last one may be partial."""
    whole = numbers.shape[1] // group
    numbers[:, : whole * group].view(len(numbers), whole, group).mul_(scales[:, :whole, None])
    numbers[:, whole * group :].mul_(scales[:, whole:])
    return numbers
