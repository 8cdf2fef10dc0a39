"""int4 packs, as Kimi-K2-Thinking and K2.5 are published (compressed-tensors, `pack-quantized`):
eight numbers of four bits in an int32 word, and a scale per row and group of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

from trueline.errors import CheckpointError
from trueline.spec.fields import Fields
from trueline.spec.source import Fact, default
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import PLAIN_DTYPES, Format, Stored, beside
from trueline.weights.formats.exempt import names_and_patterns, read_ignored_modules
from trueline.weights.formats.scales import check_scales, groups_of, times_groups

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8  # numbers in an int32
SHAPE_DTYPES = ("I64", "I32")
TARGET = "Linear"
"""The class of modules that the one group of a config quantises."""


@dataclass(frozen=True, slots=True)
class Int4Stored:
    """W = (nibble - 8) × the scale of its row and group. `packed` and `scales` both begin at the
    first column of a group, so that the weight's column c stands at first + c: in word
    (first + c) // 8, nibble (first + c) % 8 (bits 4n to 4n + 3), group (first + c) // group."""

    packed: Tensor  # [rows, words] int32
    scales: Tensor  # [rows, groups], as stored: bfloat16, float16 or float32
    group: int
    """Columns of one scale: a multiple of 8."""
    columns: int
    first: int = 0
    """Where the first column stands in the first group: a cut may begin inside of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.packed), self.columns

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def cut(self, axis: int, start: int, stop: int) -> Int4Stored:
        if axis == 0:
            return replace(self, packed=self.packed[start:stop], scales=self.scales[start:stop])
        begin, end = self.first + start, self.first + stop
        low, high = begin // self.group, -(-end // self.group)
        word = low * self.group // WORD
        return replace(
            self,
            packed=self.packed[:, word : -(-end // WORD)],
            scales=self.scales[:, low:high],
            columns=stop - start,
            first=begin - low * self.group,
        )

    def dequantise(self) -> Tensor:
        import torch  # `inspect` reads configs with this file, and needs none

        numbers = torch.empty(*self.packed.shape, WORD, device=self.packed.device)
        for place in range(WORD):
            numbers[..., place] = ((self.packed >> 4 * place) & 15) - 8
        scaled = times_groups(numbers.flatten(1), self.scales.float(), self.group)
        return scaled[:, self.first : self.first + self.columns]


@dataclass(frozen=True, kw_only=True)
class PackInt4(Format):
    """W = (nibble - 8) × weight_scale of its row and group; weight_shape says [rows, columns]."""

    label = "int4"

    group: int
    ignored_modules: tuple[str, ...]

    def names(self, weight: str) -> tuple[str, ...]:
        suffixes = ("weight_packed", "weight_scale", "weight_shape")
        return tuple(beside(weight, suffix) for suffix in suffixes)

    def stored_slices(self, cut: tuple[slice, ...]) -> tuple[tuple[slice, ...], ...]:
        """Words from the first one of a group on, as `Int4Stored` has them."""
        rows, columns = cut
        groups = groups_of(columns, self.group)
        words = slice(groups.start * self.group // WORD, -(-columns.stop // WORD))
        return (rows, words), (rows, groups), (slice(0, 2),)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """With scales in 16 bits, as published."""
        rows, columns = shape
        return rows * (4 * -(-columns // WORD) + 2 * -(-columns // self.group))

    def exempts(self, weight: str) -> bool:
        """As the compressed-tensors package matches: a module's full name, the name of its class,
        or an expression that fits the beginning of its name."""
        module = weight.rpartition(".")[0]
        names, patterns = names_and_patterns(self.ignored_modules)
        if module in names or TARGET in names:
            return True
        return any(pattern.match(module) for pattern in patterns)

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        packed, scale, stored_shape = tensors
        rows, columns = shape
        if columns % self.group:
            return f"{packed}: {columns} columns are not whole groups of {self.group}"
        words, groups = [rows, columns // WORD], [rows, columns // self.group]
        if list(packed.shape) != words or packed.dtype != "I32":
            return f"{packed}: accepted: I32 {words}"
        if list(scale.shape) != groups or scale.dtype not in PLAIN_DTYPES:
            return f"{scale}: accepted: {' or '.join(PLAIN_DTYPES)} {groups}"
        if stored_shape.shape != (2,) or stored_shape.dtype not in SHAPE_DTYPES:
            return f"{stored_shape}: accepted: {' or '.join(SHAPE_DTYPES)} [2]"
        return None

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> Stored:
        packed, scales, shape = values
        rows, columns = len(packed), scales.shape[1] * self.group
        if shape.tolist() != [rows, columns]:
            raise CheckpointError(
                f"{tensors[2]}: holds {shape.tolist()}; accepted: {[rows, columns]}, as config.json"
            )
        return Int4Stored(packed, scales, self.group, columns)

    def check(self, tensors: Sequence[StoredTensor], stored: Stored) -> None:
        assert isinstance(stored, Int4Stored)
        check_scales(tensors[1], stored.scales)


def read(section: Fields) -> PackInt4:
    """Of `quantization_config` with quant_method compressed-tensors."""
    section.choice("format", ("pack-quantized",))
    section.must_equal("quantization_status", "compressed", "weights are stored quantised")
    for key in ("kv_cache_scheme", "moe_sparsity_config"):
        section.must_equal(key, None, "nothing but weights is quantised")
    for key in ("sparsity_config", "transform_config"):
        section.must_equal(key, {}, "weights are neither sparse nor transformed")
    group = _read_group(section)
    ignored = read_ignored_modules(section, ("ignore",))
    section.finish(
        {"global_compression_ratio": "a statistic", "version": "of the package that wrote it"}
    )
    return PackInt4.of(group=group, ignored_modules=ignored)


def _read_group(section: Fields) -> Fact[int]:
    """The columns of one scale, after a check of all that the one group of modules says."""
    groups = section.section("config_groups", accepts="one group")
    if groups is None or len(groups.raw) != 1:
        section.refuse("config_groups", "an object with one group")
    (name,) = groups.raw
    scheme = groups.section(name, accepts="targets, weights, and activations that are null")
    if scheme is None:
        groups.refuse(name, "an object with targets and weights")

    def is_target(value: object) -> TypeGuard[str]:
        return value == TARGET

    scheme.list_of("targets", is_target, f'"{TARGET}"', length=1)
    scheme.must_equal("format", "pack-quantized", "as the whole checkpoint")
    for key in ("input_activations", "output_activations"):
        scheme.must_equal(key, None, "activations are not quantised")
    weights = scheme.section("weights", accepts="the keys of symmetric int4 in groups")
    if weights is None:
        scheme.refuse("weights", "an object: num_bits 4, type int, strategy group")
    scheme.finish({})
    weights.choice("type", ("int",), default=default("int", "the package's"))
    weights.integer("num_bits", minimum=4, maximum=4)
    weights.choice("strategy", ("group",), default=default("group", "what group_size means"))
    group = weights.integer("group_size", minimum=WORD, maximum=65536)
    if group.value % WORD:
        weights.refuse("group_size", f"a multiple of {WORD}, so that groups are whole words")
    if not weights.boolean("symmetric", default=default(True, "the package's")).value:
        weights.refuse("symmetric", "true: zero points cannot be loaded")
    weights.must_equal("dynamic", False, "scales are stored")
    for key in ("actorder", "block_structure", "scale_dtype", "zp_dtype"):
        weights.must_equal(key, None, "columns are in order, scales as they are stored")
    weights.finish(dict.fromkeys(("observer", "observer_kwargs"), "how the scales were found"))
    return group
