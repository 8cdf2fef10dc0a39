"""Two ways, by the number of tokens: a handful streams its experts pair by pair (few.py), more are
sorted by expert first (kernels.py). Both are asynchronous, and a token's sum runs over its
experts in the order of its ids. What is compiled depends on the model and on the way, little on the
number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import triton
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, few, kernels
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight, dense

capabilities = IMPLEMENTATIONS["triton"]

# Pairs that are streamed one by one.
FEW_PAIRS = 18
# Bytes of weights that one of their programs holds in registers, and that a warp can hold.
HELD_BYTES = 16 << 10
WARP_BYTES = 8 << 10
MOST_WARPS = 16
# Pairs that one program of the sort looks at: those of most decode steps, or of longer ones.
SHORT, SEGMENT = 512, 2048
SUM_BLOCK = 1024
MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Tensor
    down: Tensor
    shared: int
    """Of the experts, those at the end that every token takes with weight 1."""
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """How one of the two GEMMs is tiled."""

    columns: int
    """Rows of the weight a program holds; for gate and up together."""
    inner: int
    """Numbers of a row that are loaded together; 0: all of them."""
    warps: int = 4
    stages: int = 4
    rows: int = 16
    """Pairs of one expert. The same for both GEMMs of a step."""
    swap: bool = True
    group: int = 1
    halve: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsLaunch:
    way: Literal["few", "sorted"]
    first: GemmTiles
    second: GemmTiles


def launch(
    tokens: int, top: int, shared: int, experts: int, hidden: int, width: int, dtype: torch.dtype
) -> ExpertsLaunch:
    """As measured on an H200."""
    pairs = tokens * (top + shared)
    # an output of the first needs a row of gate and one of up
    first = _at_once(2 * power_of_two(hidden) * dtype.itemsize)
    if pairs <= FEW_PAIRS and first.warps <= MOST_WARPS:
        column = (top + shared) * power_of_two(width) * dtype.itemsize
        if column <= HELD_BYTES:
            return ExpertsLaunch("few", first, _at_once(column, 2 * HELD_BYTES))
        second = GemmTiles(4, 1024, stages=3) if width >= 1024 else GemmTiles(8, 512, stages=3)
        return ExpertsLaunch("few", first, second)
    mean = tokens * top / max(experts, 1)
    # One tile for nearly every expert, so that its weights are read once.
    rows = min(max(power_of_two(int(mean + 1.5 * mean**0.5) + 1), 16), MOST_ROWS)
    if dtype == torch.float32:  # no tensor cores: what fits into registers
        tiles = GemmTiles(64, 32, stages=2, rows=min(rows, 32), swap=False)
    elif rows == MOST_ROWS:
        tiles = GemmTiles(256, 64, 8, 3, rows, swap=False, group=8, halve=True)
    elif rows == 16:
        tiles = GemmTiles(128, 128, stages=3)
    else:
        tiles = GemmTiles(64, 128, rows=rows)
    return ExpertsLaunch("sorted", tiles, tiles)


def _at_once(column: int, held: int = HELD_BYTES) -> GemmTiles:
    """`column`: bytes of weights that an output needs."""
    columns = power_of_two(max(held // column, 1) // 2 + 1)
    return GemmTiles(columns, 0, max(power_of_two(columns * column // WARP_BYTES), 4))


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed:
    return Packed(dense(gate_up).contiguous(), dense(down).contiguous(), 0, limit)


def pack_with_shared(
    gate_up: Weight | Tensor,
    down: Weight | Tensor,
    shared_gate_up: Weight | Tensor,
    shared_down: Weight | Tensor,
    linear: LinearOp,
    limit: float | None = None,
) -> Packed:
    width = down.shape[2]
    count = shared_down.shape[1] // width
    more = dense(shared_gate_up).view(2, count, width, -1).transpose(0, 1).flatten(1, 2)
    more_down = dense(shared_down).view(-1, count, width).transpose(0, 1)
    both = torch.cat((dense(gate_up), more)), torch.cat((dense(down), more_down))
    return Packed(*both, count, limit)


Added = Callable[[], Tensor]
"""Waits for what is added to the experts' sum."""
More = Callable[[], Added]
"""Begins it, beside what is launched next."""


def run(
    x: Tensor, ids: Tensor, weights: Tensor, packed: Packed, linear: LinearOp, first: int = 0
) -> Tensor:
    return run_with(_launched(x, ids, packed), x, ids, weights, packed, first)


def run_added(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    more: More,
    packed: Packed,
    linear: LinearOp,
    first: int = 0,
) -> Tensor:
    return run_with(_launched(x, ids, packed), x, ids, weights, packed, first, more)


def _launched(x: Tensor, ids: Tensor, packed: Packed) -> ExpertsLaunch:
    (count, hidden, width), shared = packed.down.shape, packed.shared
    return launch(len(x), ids.shape[1], shared, count - shared, hidden, width, x.dtype)


def run_with(
    how: ExpertsLaunch,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed,
    first: int = 0,
    more: More | None = None,
) -> Tensor:
    x, ids, weights = unit_stride(x), ids.contiguous(), weights.contiguous()
    step = _Step(x, ids, weights, packed, first)
    if how.way != "few":
        return step.many(how, more)
    added = None if more is None else more()
    made = step.few(how)
    return made if added is None else made + added()


@dataclass(frozen=True, slots=True)
class _Step:
    x: Tensor
    ids: Tensor
    weights: Tensor
    packed: Packed
    first: int

    @property
    def choices(self) -> dict[str, int]:
        return {"TOP": self.ids.shape[1], "SHARED": self.packed.shared}

    @property
    def pairs(self) -> int:
        return self.ids.numel() + len(self.ids) * self.packed.shared

    @property
    def held(self) -> tuple[int, int]:
        """The first routed expert here, and how many there are."""
        return self.first, len(self.packed.down) - self.packed.shared

    def few(self, how: ExpertsLaunch) -> Tensor:
        x, (_, hidden, width) = self.x, self.packed.down.shape
        middle, out = x.new_empty(self.pairs, width), x.new_empty(len(x), hidden)
        few.gated[(triton.cdiv(width, how.first.columns), self.pairs)](
            *(x, x.stride(0), self.ids, self.packed.gate_up, middle),
            *(*self.held, len(x), hidden, width),
            **self.choices,
            LIMIT=self.packed.limit,
            **_streamed(how.first, hidden),
        )
        down = few.down if how.second.inner else few.down_at_once
        down[(triton.cdiv(hidden, how.second.columns), len(x))](
            *(middle, self.ids, self.weights, self.packed.down, out),
            *(*self.held, hidden, width),
            **self.choices,
            **_streamed(how.second, width),
        )
        return out

    def many(self, how: ExpertsLaunch, more: More | None) -> Tensor:
        x, (_, hidden, width) = self.x, self.packed.down.shape
        middle, parts = x.new_empty(self.pairs, width), x.new_empty(self.pairs, hidden)
        order = self._sorted(how.first.rows)
        added = None if more is None else more()
        self._product(x, self.packed.gate_up, middle, how.first, order, True)
        self._product(middle, self.packed.down, parts, how.second, order, False)
        out = x.new_empty(len(x), hidden)
        sum_pairs(parts, self.ids, self.held, self.choices, out, added)
        return out

    def _sorted(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return sort_pairs(
            self.ids, len(self.packed.down), self.pairs, self.held, self.choices, rows
        )

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        cut: GemmTiles,
        order: tuple[Tensor, Tensor, Tensor],
        gated: bool,
    ) -> None:
        depth, width = weight.shape[2], out.shape[1]
        columns = triton.cdiv(width, cut.columns // 2 if gated else cut.columns)
        tiles = triton.cdiv(len(order[1]), cut.group) * cut.group
        kernels.grouped[(tiles * columns,)](
            *(x, x.stride(0), weight, self.weights, out, *order, self.pairs, depth, width),
            **self.choices,
            **_tiled(cut, depth),
            GATED=gated,
            LIMIT=self.packed.limit if gated else None,
        )


def sort_pairs(
    ids: Tensor,
    experts: int,
    pairs: int,
    held: tuple[int, int],
    choices: dict[str, int],
    rows: int,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert in tiles of `rows`, the expert of each tile, and the number of tiles.
    `places`: to be filled with where each pair is then."""
    bins, block = power_of_two(experts), SHORT if pairs <= SHORT else SEGMENT
    segments = triton.cdiv(pairs, block)
    room = (pairs + min(experts, pairs) * (rows - 1)) // rows
    counts, order, tiles, total = (
        ids.new_empty(size, dtype=torch.int32) for size in (segments * bins, room * rows, room, 1)
    )
    shape = choices | {"BINS": bins, "BLOCK": block, "num_warps": 8}
    if segments > 1:
        kernels.count[(segments,)](ids, counts, pairs, *held, **shape)
    kernels.place[(experts, segments)](
        *(ids, counts, order, tiles, total, order if places is None else places),
        *(pairs, *held, segments, rows),
        **shape,
        MOST=MOST_ROWS,
        ALONE=segments == 1,
        PLACES=places is not None,
    )
    return order, tiles, total


def sum_pairs(
    parts: Tensor,
    ids: Tensor,
    held: tuple[int, int],
    choices: dict[str, int],
    out: Tensor,
    added: Added | None,
) -> None:
    hidden, more = out.shape[1], None if added is None else added().contiguous()
    kernels.combine[(len(out), triton.cdiv(hidden, SUM_BLOCK))](
        *(parts, ids, more, out, *held, hidden), **choices, BLOCK=SUM_BLOCK
    )


def _streamed(cut: GemmTiles, depth: int) -> dict[str, int]:
    names = {"BLOCK_N": cut.columns, "num_warps": cut.warps}
    if not cut.inner:
        return names | {"BLOCK_K": power_of_two(depth)}
    return names | {"BLOCK_K": cut.inner, "STAGES": cut.stages}


def _tiled(cut: GemmTiles, depth: int) -> dict[str, int | bool]:
    return {
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.columns,
        "BLOCK_K": cut.inner,
        "EVEN_K": depth % cut.inner == 0,
        "SWAP": cut.swap,
        "GROUP": cut.group,
        "HALVE": cut.halve,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
