"""Where a tensor's numbers are when a model runs on several ranks. The three are types: a sum that
nobody has reduced does not fit where a layer's input is wanted. And they are values, by which a
layer checks when it is built that its weights, as they were cut, and its exchange fit together."""

from __future__ import annotations

from enum import Enum
from typing import NewType

from torch import Tensor

from trueline.errors import TruelineError
from trueline.spec.source import Span

Replicated = NewType("Replicated", Tensor)
"""Every rank has all of it."""
Partial = NewType("Partial", Tensor)
"""Every rank has summands of all of it: an all-reduce gives it."""
Divided = NewType("Divided", Tensor)
"""Every rank has some channels of it: an all-gather gives it."""


class Placement(Enum):
    REPLICATED = "replicated"
    PARTIAL = "partial"
    DIVIDED = "divided"


class PlacementError(TruelineError):
    """A model on several ranks whose parts do not fit together."""

    exit_code = 1


def check_shape(name: str, shape: tuple[int, ...], *wanted: int) -> None:
    """That a weight was cut as its spec says."""
    if tuple(shape[-len(wanted) :]) != wanted:
        raise PlacementError(
            f"{name}: this rank's part is {list(shape)}, and its spec wants {list(wanted)}"
        )


def after_gemm(name: str, x: Placement, *, outputs: Span, inputs: Span) -> Placement:
    """Of x times a weight that has these outputs and sums over these inputs."""
    wanted = Placement.REPLICATED if inputs.is_whole else Placement.DIVIDED
    if x is not wanted:
        raise PlacementError(
            f"{name} sums over {inputs} inputs: its input must be {wanted.value}, and is {x.value}"
        )
    if inputs.is_whole:
        return Placement.REPLICATED if outputs.is_whole else Placement.DIVIDED
    if not outputs.is_whole:
        raise PlacementError(f"{name} is divided along its outputs ({outputs}) and its inputs")
    return Placement.PARTIAL


def added(name: str, *parts: Placement) -> Placement:
    """Of their sum: one that is partial and one that is not would count differently."""
    if len(set(parts)) != 1:
        found = " and ".join(part.value for part in parts)
        raise PlacementError(f"{name} adds what is {found}: an exchange fits one of them only")
    return parts[0]


def check_all_reduce(name: str, x: Placement, size: int) -> None:
    if size > 1 and x is not Placement.PARTIAL:
        raise PlacementError(
            f"{name}: an all-reduce of what is {x.value} would count it {size} times; it must be "
            "partial"
        )
