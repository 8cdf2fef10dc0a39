"""Weight formats, one file each.

A format says which stored tensors make up one weight, what may be wrong with them, and what numbers
they mean. A storage says which format each weight of a checkpoint has; a format is the storage of a
checkpoint that has no other. `models/storage.py` has the table by `quant_method`; packages add
theirs through entry points. No torch is imported here: `inspect` reads configs and headers without
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec, WeightStorage
from trueline.spec.parameters import Parameter, Piece
from trueline.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_DTYPES = ("F32", "F16", "BF16")


class Stored(Protocol):
    """The tensors that make up one weight, or a cut of it. Never changed: methods give new ones."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that it means."""

    @property
    def nbytes(self) -> int:
        """As stored, scales included."""

    def cut(self, axis: int, start: int, stop: int) -> Stored:
        """Some rows, or columns. Cuts need not fall on the edges of blocks."""

    def dequantise(self) -> Tensor:
        """The numbers: exact, or value × scale in float32."""


@dataclass(frozen=True, kw_only=True)
class Storage(WeightStorage, ABC):
    """How one checkpoint stores its quantised weights, as `read` found it in the config."""

    @property
    @abstractmethod
    def formats(self) -> tuple[Format, ...]:
        """All that it has beside plain float."""

    @abstractmethod
    def format_of(self, weight: str) -> Format:
        """The one of a weight of this name, where it is quantised."""


@dataclass(frozen=True, kw_only=True)
class Format(Storage, ABC):
    """A format with the facts of one checkpoint, which has it for all that it quantises."""

    numerics: ClassVar[tuple[str, ...]] = ("weights",)
    """Its products: with activations as computed ("weights"), or quantised too ("activations")."""

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self,)

    def format_of(self, weight: str) -> Format:
        return self

    @abstractmethod
    def names(self, weight: str) -> tuple[str, ...]:
        """Names of the tensors that make up a weight. The first one holds its numbers."""

    @abstractmethod
    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        """What is wrong with their headers, for a weight of this shape; None if nothing is."""

    @abstractmethod
    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        """The weight that these tensors make up. Reads neither numbers nor scales: a rank may want
        few of them. `tensors` has what an error names."""

    def check(self, tensors: Sequence[StoredTensor], stored: Stored) -> None:
        """Raises where the numbers or scales of a weight that `open` gave, or of a cut of it, are
        such as may not be."""

    def stored_slices(self, cut: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...] | None:
        """Of each of the tensors, what a rank holds that has these rows and columns of the weight;
        None: not known before it is opened."""
        return None

    def stored_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Of a weight of this shape, scales included; None: not known before it is opened."""
        return None

    def exempts(self, weight: str) -> bool:
        """Whether the config says that a weight of this name is stored unquantised."""
        return False


def beside(weight: str, name: str) -> str:
    """A tensor of the same module."""
    return f"{weight.rpartition('.')[0]}.{name}"


def wrong_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> str | None:
    if tensor.shape == shape:
        return None
    return f"{tensor}: the config wants shape {list(shape)}"


def may_be_quantised(parameter: Parameter, piece: Piece) -> bool:
    """Matrices may be, unless all experts stand in one tensor."""
    return parameter.kind == "matrix" and piece is not parameter.fused


def format_of(spec: ModelSpec, parameter: Parameter, piece: Piece) -> Format | None:
    """The quantised format of a parameter's piece, as the config has it; None: plain float."""
    storage = spec.storage
    if not isinstance(storage, Storage) or not may_be_quantised(parameter, piece):
        return None
    fmt = storage.format_of(piece.source)
    return None if fmt.exempts(piece.source) else fmt


AsStored = Callable[[str, str], bool]
"""Whether a parameter, by its name, stays in this format."""


def weight_bytes(spec: ModelSpec, itemsize: int, as_stored: AsStored) -> int:
    """Of all parameters: those that stay as stored, and plain float of this size."""
    return sum(parameter_bytes(spec, each, itemsize, as_stored) for each in parameters(spec))


def parameter_bytes(
    spec: ModelSpec, parameter: Parameter, itemsize: int, as_stored: AsStored
) -> int:
    numbers = stored = 0
    for piece in parameter.pieces:
        fmt, count = format_of(spec, parameter, piece), prod(piece.shape)
        stays = fmt is not None and as_stored(parameter.name, fmt.label)
        kept = fmt.stored_bytes(piece.shape) if fmt and stays else None
        numbers, stored = numbers + count, stored + (count * itemsize if kept is None else kept)
    return parameter.count * stored // numbers  # this rank's share of what is stored


def kept_formats(spec: ModelSpec, as_stored: AsStored) -> set[str]:
    """Those that some parameter stays in."""
    pieces = ((p, piece) for p in parameters(spec) for piece in p.pieces)
    return {
        fmt.label
        for parameter, piece in pieces
        if (fmt := format_of(spec, parameter, piece)) and as_stored(parameter.name, fmt.label)
    }


def quantised_formats(spec: ModelSpec) -> tuple[Format, ...]:
    """Those that a checkpoint has beside plain float, if any of its weights may be in them."""
    if not isinstance(spec.storage, Storage):
        return ()
    pieces = ((p, piece) for p in parameters(spec) for piece in p.pieces)
    used = {fmt.label for pair in pieces if (fmt := format_of(spec, *pair))}
    return tuple(fmt for fmt in spec.storage.formats if fmt.label in used)
