"""Layouts of cache rows in memory. Writers and readers take every address from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trueline.errors import UsageError


def cells(block_size: int, block_ids: list[int], start: int, stop: int) -> list[int]:
    """Addresses of positions start..stop of a sequence with these blocks."""
    return [block_ids[p // block_size] * block_size + p % block_size for p in range(start, stop)]


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One row per position: [latent after its norm | rotated key], both in the dtype of
    computation, or as `fp8` says. A block is `block_size` rows that follow each other; a cell is a
    row's address."""

    latent: int
    rope: int
    block_size: int
    fp8: LatentFp8 | None = None

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.latent + self.rope

    def row_bytes(self, itemsize: int) -> int:
        """`itemsize`: of the dtype of computation."""
        if self.fp8 is None:
            return self.width * itemsize
        return _aligned(self.rope_start + self.rope * STORAGES[self.fp8.rope].itemsize)

    @property
    def num_groups(self) -> int:
        """Scales of an fp8 row; the last group may have fewer channels."""
        assert self.fp8 is not None
        return -(-self.latent // self.fp8.group)

    @property
    def scales_start(self) -> int:
        """Byte of an fp8 row."""
        return _aligned(self.latent)

    @property
    def rope_start(self) -> int:
        """Byte of an fp8 row."""
        return self.scales_start + self.num_groups * SCALE_BYTES

    def cell(self, block_id: Any, position: Any) -> Any:
        """Of one position, or of a tensor of them."""
        return block_id * self.block_size + position % self.block_size

    def cells(self, block_ids: list[int], start: int, stop: int) -> list[int]:
        return cells(self.block_size, block_ids, start, stop)


@dataclass(frozen=True, slots=True)
class Fp8:
    """A variant of e4m3. The same byte is another number in the other variant."""

    largest: float
    step: float
    """Between the numbers next to zero."""
    nan: int
    """A byte that is no number, whatever its sign if it has one."""


@dataclass(frozen=True, slots=True)
class Storage:
    itemsize: int
    fp8: Fp8 | None = None


STORAGES = {
    "float32": Storage(4),
    "bfloat16": Storage(2),
    "float16": Storage(2),
    "e4m3fn": Storage(1, Fp8(448.0, 2.0**-9, 0x7F)),
    "e4m3fnuz": Storage(1, Fp8(240.0, 2.0**-10, 0x80)),
}
FP8_STORAGES = tuple(name for name, storage in STORAGES.items() if storage.fp8)
SCALE_BYTES = 4
LATENT_GROUP = 128
"""Channels of an fp8 latent that share a scale, unless told otherwise."""
AMAX_FLOOR = 1e-4
"""Numbers none of which is larger than this are scaled as if one were: zeros need a scale too."""


@dataclass(frozen=True, slots=True)
class LatentFp8:
    """A cache row whose latent is stored in fp8, as bytes:

        [a code per channel of the latent | a float32 scale per group of channels | rotated key]

    Scales, and the next row, begin at multiples of 4 bytes. DeepSeek-V3.2's public cache is e4m3fn
    in groups of 128 with a bfloat16 key: 512 + 16 + 128 bytes.

    Writing, per group: scale = max(amax, AMAX_FLOOR) / largest, rounded up to a power of two where
    `power_of_two` is on; code = x / scale, in float32, then rounded to nearest, ties to even. NaN
    is the scale of a group that has an infinity or a NaN. Reading gives code × scale, rounded to
    the dtype of computation. The one latent is key and value of its position: both are read with
    the same scale. The rotated key is not quantised."""

    storage: str
    rope: str
    """Storage of the rotated key."""
    group: int
    """Channels that share a scale: from 1 up; no fewer than the latent has is one a token."""
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.storage not in FP8_STORAGES:
            raise UsageError(f"latent cache: storage = {self.storage!r}: accepted: {FP8_STORAGES}")

    @property
    def variant(self) -> Fp8:
        variant = STORAGES[self.storage].fp8
        assert variant is not None
        return variant


def _aligned(byte: int) -> int:
    return -(-byte // SCALE_BYTES) * SCALE_BYTES


INDEX_LAYOUTS = ("rows", "planar", "shuffled")
GROUP = 16
"""Tokens of a shuffled group, and bytes that one of them has side by side."""


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """Where the bytes of the indexer's keys are; one key of `dim` numbers per position.

    - `rows`: token after token, the key and then its scale;
    - `planar`: all keys of a block, then all its scales;
    - `shuffled`: keys as [block / 16, key bytes / 16, 16 tokens, 16 bytes], then all scales.

    An fp8 key has one float32 scale: amax / largest, rounded up to a power of two unless
    `power_of_two` is off. Reading multiplies by it, which a power of two makes exact. Other storage
    has no scale.

    Addresses are within one layer's bytes, of one cell or a tensor of them: byte b of a key is at
    `key_start(cell) + key_offset(b)`."""

    dim: int
    block_size: int
    storage: str
    kind: str
    power_of_two: bool = True

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("storage", self.storage, tuple(STORAGES)),
            ("layout", self.kind, INDEX_LAYOUTS),
        ):
            if value not in accepted:
                raise UsageError(f"index cache: {name} = {value!r}: accepted: {accepted}")
        for name, count in (("block_size", self.block_size), ("key bytes", self.key_bytes)):
            if self.kind == "shuffled" and count % GROUP:
                raise UsageError(
                    f"index cache: {name} = {count}: the shuffled layout takes multiples of "
                    f"{GROUP}; 'rows' and 'planar' take any"
                )

    @property
    def fp8(self) -> Fp8 | None:
        return STORAGES[self.storage].fp8

    @property
    def itemsize(self) -> int:
        return STORAGES[self.storage].itemsize

    @property
    def key_bytes(self) -> int:
        return self.dim * self.itemsize

    @property
    def token_bytes(self) -> int:
        return self.key_bytes + (SCALE_BYTES if self.fp8 else 0)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def side_by_side(self) -> int:
        """Tokens whose keys lie between each other's runs."""
        return GROUP if self.kind == "shuffled" else 1

    @property
    def run(self) -> tuple[int, int]:
        """Contiguous bytes of a key, and the distance from one such run to the next."""
        if self.kind == "shuffled":
            return GROUP, GROUP * GROUP
        return self.key_bytes, self.key_bytes

    def key_start(self, cell: Any) -> Any:
        block, place = cell // self.block_size, cell % self.block_size
        if self.kind == "rows":
            within = place * self.token_bytes
        elif self.kind == "planar":
            within = place * self.key_bytes
        else:
            within = place // GROUP * GROUP * self.key_bytes + place % GROUP * GROUP
        return block * self.block_bytes + within

    def key_offset(self, byte: Any) -> Any:
        length, distance = self.run
        return byte // length * distance + byte % length

    def scale_start(self, cell: Any) -> Any:
        block, place = cell // self.block_size, cell % self.block_size
        if self.kind == "rows":
            return self.key_start(cell) + self.key_bytes
        keys = self.block_size * self.key_bytes
        return block * self.block_bytes + keys + place * SCALE_BYTES
