"""Random weights without a file. Each is drawn from a generator of its own, seeded by (seed, name):
the same numbers whatever else is in the model. Quantised ones are drawn as codes and scales."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trueline.models.parameters import parameters
from trueline.spec.model import ModelSpec
from trueline.spec.parameters import Parameter, ParameterKind, Piece
from trueline.weights.formats import Format, Stored, format_of
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.dense import DENSE, DenseStored
from trueline.weights.formats.fp4 import GROUP, Fp4, Fp4Stored
from trueline.weights.formats.pack_int4 import WORD, Int4Stored, PackInt4
from trueline.weights.load import held_dtype, placed, taken_from
from trueline.weights.value import StoredPart, Weight

# What is left of a drawn correction bias, so that it does not choose the experts.
EVEN = 0.01
# Numbers that are drawn at a time.
MOST_DRAWN = 1 << 28
# Standard deviations of drawn codes.
FP8_SPREAD, INT4_SPREAD, FP4_SPREAD = 64.0, 4.6, 2.9
FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Standard deviations of what no input multiplies. That of hc_base is large enough for Sinkhorn's
# iterations to go on changing the matrix.
GAINS: Mapping[ParameterKind, float] = {
    "embedding": 1.0,
    "norm_bias": 0.5,
    "position_bias": 1.0,
    "sinks": 1.0,
    "hc_base": 2.0,
}
DRAWN = (BlockFp8, PackInt4, Fp4)
"""Formats that are drawn as stored."""


class DummyWeights:
    """Weights that spread routing over all experts, each drawn, on the device, when it is taken."""

    def __init__(
        self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters(spec)}
        self._spec = spec
        self._dtype, self._device, self._seed = dtype, device, seed

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def pop(self, name: str) -> Weight:
        parameter = self._parameters.pop(name)
        if any(self._format(parameter, piece) for piece in parameter.pieces):
            parts = tuple(self._parts(parameter))
            return Weight(parameter.shape, self._dtype, parts, self._device, self._device)
        dtype = held_dtype(parameter, self._dtype)
        value = draw_parameter(parameter, name, parameter.shape, self._seed, self._device, dtype)
        if parameter.kind == "correction_bias":
            value *= EVEN  # a checkpoint's bias evens out what its router prefers: ours has none
        return Weight.of(value)

    def _format(self, parameter: Parameter, piece: Piece) -> Format | None:
        """That a stored tensor is drawn in; None: plain float, as those of packages' formats."""
        fmt = format_of(self._spec, parameter, piece)
        return fmt if isinstance(fmt, DRAWN) else None

    def _parts(self, parameter: Parameter) -> Iterator[StoredPart]:
        for piece in parameter.pieces:
            fmt = self._format(parameter, piece)
            if fmt is None:
                value = draw(
                    piece.source, piece.shape, parameter.kind, self._seed, self._device, self._dtype
                )
                whole: Stored = DenseStored(value)
            else:
                generator = _generator(piece.source, self._seed, self._device)
                whole = draw_stored(fmt, piece.shape, self._dtype, generator)
            for stored, put in taken_from(whole, piece):
                yield placed(stored, (fmt or DENSE).label, put)


def draw_parameter(
    parameter: Parameter,
    name: str,
    shape: tuple[int, ...],
    seed: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A parameter, or a piece of it of this shape."""
    if parameter.below is None:
        return draw(name, shape, parameter.kind, seed, device, dtype)
    rows, width = shape
    generator = _generator(name, seed, device)
    order = torch.rand((rows, parameter.below), generator=generator, device=device).argsort(dim=1)
    return order[:, :width].clone()  # no expert twice in a row


def draw(
    name: str,
    shape: tuple[int, ...],
    kind: ParameterKind,
    seed: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Drawn in float32. Another device has other numbers."""
    generator = _generator(name, seed, device)
    if kind in ("norm", "hc_scale", "correction_bias"):
        between = torch.rand(shape, generator=generator, device=device)
        return (0.4 * between - 0.2 if kind == "correction_bias" else 0.5 + between).to(dtype)
    gain = GAINS.get(kind)
    if gain is None:
        gain = {"router": 1.5, "head": 1.5}.get(kind, 1.0) / math.sqrt(shape[-1])
    drawn = torch.empty(shape, dtype=dtype, device=device)
    # a slab at a time: a block of float32 that was freed would not be given back once a smaller
    # tensor lies in it
    rows = max(MOST_DRAWN // max(math.prod(shape[1:]), 1), 1)
    for slab in (drawn[start : start + rows] for start in range(0, len(drawn), rows)):
        slab.copy_(torch.randn(slab.shape, generator=generator, device=device).mul_(gain))
    return drawn


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def draw_stored(
    fmt: Format, shape: tuple[int, ...], plain: torch.dtype, generator: torch.Generator
) -> Stored:
    """A matrix of one of the formats DRAWN, about as large as a plain one. `plain`: the dtype of
    scales that are stored unquantised."""
    rows, columns = shape
    device = generator.device
    if isinstance(fmt, BlockFp8):
        numbers = torch.randn(shape, generator=generator, device=device).mul_(FP8_SPREAD)
        codes = numbers.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        grid = [-(-size // block) for size, block in zip(shape, fmt.block, strict=True)]
        scales = _draw_scales(grid, FP8_SPREAD, columns, generator)
        if fmt.powers_of_two:
            scales = scales.log2().round().exp2()
        return Fp8Stored(codes, scales, fmt.block, powers_of_two=fmt.powers_of_two)
    if isinstance(fmt, PackInt4):
        packed = _draw_bytes((rows, 4 * -(-columns // WORD)), generator).view(torch.int32)
        scales = _draw_scales([rows, -(-columns // fmt.group)], INT4_SPREAD, columns, generator)
        return Int4Stored(packed, scales.to(plain), fmt.group, columns)
    packed = _draw_bytes((rows, -(-columns // 2)), generator)
    powers = _draw_scales([rows, -(-columns // GROUP)], FP4_SPREAD, columns, generator).log2()
    return Fp4Stored(packed, (powers.round() + 127).to(torch.uint8), columns)


def _draw_bytes(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(
        256, shape, generator=generator, device=generator.device, dtype=torch.uint8
    )


def _draw_scales(
    grid: list[int], spread: float, columns: int, generator: torch.Generator
) -> Tensor:
    """Within an octave around what makes numbers as large as those of a plain matrix."""
    between = torch.rand(grid, generator=generator, device=generator.device)
    return torch.exp2(between - 0.5) / (spread * math.sqrt(columns))
