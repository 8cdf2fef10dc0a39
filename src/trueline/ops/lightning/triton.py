"""Decode: one kernel, at the speed of the memory that holds the states. Prefill: a *walk* is a run
of a row's tokens that programs go through chunk by chunk, with the state in registers; its *legs*
end where a slot takes the state. Where rows alone do not fill the GPU they are cut into several
walks, and what each adds to the state is summed up first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trueline.cache.state import StateView
from trueline.ops.launch import can_copy, copied, num_sms, power_of_two, unit_stride
from trueline.ops.lightning import IMPLEMENTATIONS, PrefillParts, StateRow, StateTable, clashing
from trueline.ops.lightning.kernels import decode_step, scan, walk

capabilities = IMPLEMENTATIONS["triton"]

NO_SLOT = -1
SCAN_BLOCK = 1024
# Chunks that are walked in the time that a second and a third kernel take.
FEW_CHUNKS = 4
# And by narrow programs, which are many.
FEW_NARROW_CHUNKS = 16
# Channels of a head with which those were right on a GPU.
NARROW_CHANNELS = (64, 128)


@dataclass(frozen=True, slots=True)
class PreparedDecode:
    table: StateTable
    moved: tuple[Tensor, Tensor] | None
    """Sources that another row writes, and the slots where they are read instead."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    values: int  # channels of a program
    warps: int


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    chunk: int  # tokens of an MMA
    values: int  # channels of a program
    warps: int
    stages: int
    programs: int  # as many as keep the GPU busy

    def walk_chunks(self, heads: int, dv: int, counts: Sequence[int]) -> int:
        """The most chunks of a walk, for rows of so many tokens."""
        chunks = [-(-count // self.chunk) for count in counts]
        tiles = heads * -(-dv // self.values)
        fair = -(-sum(chunks) * tiles // self.programs)
        longest = max(chunks)
        return longest if longest <= max(2 * fair, FEW_CHUNKS) else fair


@dataclass(frozen=True, slots=True)
class Walks:
    """On the device. Walk i has the legs from walks[i] on, row i the walks from rows[i] on."""

    num_walks: int
    num_followed: int
    walks: Tensor
    followed: Tensor  # walks that are not the last of their row
    rows: Tensor
    sources: Tensor  # of each row; NO_SLOT: zeros
    firsts: Tensor  # tokens of each leg
    stops: Tensor
    slots: Tensor  # of each leg; NO_SLOT: none takes its end


@dataclass(frozen=True, slots=True)
class PrefillRows:
    parts: PrefillParts
    walks: dict[int, Walks] = field(default_factory=dict)
    """By the most tokens of a walk: made by the first layer that asks, for all of the step."""

    def cut(self, length: int, device: torch.device) -> Walks:
        if length not in self.walks:
            self.walks[length] = _walks(self.parts, length, device)
        return self.walks[length]


# -- decode ----------------------------------------------------------------------------


def prepare(rows: Sequence[StateRow] | StateTable) -> PreparedDecode:
    if isinstance(rows, StateTable):
        return PreparedDecode(rows, None)
    device = torch.get_default_device()
    clash = clashing(rows)
    if not clash:
        return PreparedDecode(StateTable.of(rows, device), None)
    sources, slots = copied(
        ([rows[i].source or 0 for i in clash], [rows[i].slot for i in clash]), device
    )
    brought = [replace(row, source=row.slot) if i in clash else row for i, row in enumerate(rows)]
    return PreparedDecode(StateTable.of(brought, device), (sources, slots))


def decode_launch(rows: int, heads: int, dv: int, sms: int) -> DecodeLaunch:
    """Narrow tiles where there are few rows: every multiprocessor gets a part of the state."""
    values = 16 if rows * heads * dv <= 32 * 2 * sms else 32
    return DecodeLaunch(min(values, power_of_two(dv)), 4)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: PreparedDecode,
    *,
    slopes: Tensor,
    scale: float,
    launch: DecodeLaunch | None = None,
) -> Tensor:
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (rows, heads, dk), dv = q.shape, v.shape[-1]
    launch = launch or decode_launch(rows, heads, dv, num_sms(q.device))
    if prepared.moved is not None:
        view.copy(*prepared.moved)
    table, out = prepared.table, q.new_empty(rows, heads, dv)
    decode_step[(-(-dv // launch.values), heads, rows)](
        *(q, k, v, out, _state(view), table.starts, table.sources, table.slots, table.snapshots),
        *(slopes, scale, *_strides(q, k, v), heads * dk * dv),
        DK=dk, DV=dv, BK=power_of_two(dk), BV=launch.values, num_warps=launch.warps,
    )  # fmt: skip
    return out


def _state(view: StateView) -> Tensor:
    assert not view.tail, "slots with a tail are for batch-invariant mode, which this refuses"
    assert view.state.is_contiguous(), "a layer's slots follow each other"
    return view.state


def _strides(*inputs: Tensor) -> Iterator[int]:
    return (stride for x in inputs for stride in x.stride()[:2])


# -- prefill ---------------------------------------------------------------------------


def prepare_prefill(parts: PrefillParts) -> PrefillRows:
    return PrefillRows(parts)


def prefill_launch(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    counts: Sequence[int],
    sms: int,
    copied_ahead: bool,
) -> PrefillLaunch:
    """`shape`: heads, dk and dv. MMAs of float32 do not use tensor cores, and want all their
    numbers in registers. Short rows are walked in one go where narrow programs fill the GPU; but
    only with inputs that are copied ahead: for others the assembler (ptxas 12.8) lets the narrow
    MMAs read their operands from wherever an unset register points to."""
    heads, dk, dv = shape
    short = max(counts) <= 64 * FEW_NARROW_CHUNKS and dk in NARROW_CHANNELS
    if dtype == torch.float32:
        return PrefillLaunch(16, min(16, power_of_two(dv)), 4, 1, 4 * sms)
    for values in (16, 32) if short and copied_ahead and dv % 32 == 0 else ():
        if len(counts) * heads * dv // values <= 2 * sms:
            return PrefillLaunch(64, values, 4, 3, sms)
    return PrefillLaunch(64, 64, 4, 2, 2 * sms)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: PrefillRows,
    *,
    slopes: Tensor,
    scale: float,
    launch: PrefillLaunch | None = None,
) -> Tensor:
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (tokens, heads, dk), dv = q.shape, v.shape[-1]
    parts = prepared.parts
    counts = [at.stop - at.start for at, _ in parts]
    if launch is None:
        sms, ahead = num_sms(q.device), can_copy(q, k, v)
        launch = prefill_launch(q.dtype, (heads, dk, dv), counts, sms, ahead)
    length = launch.chunk * launch.walk_chunks(heads, dv, counts)
    made = prepared.cut(length, q.device)
    state, out = _state(view), q.new_empty(tokens, heads, dv)
    whole = made.num_walks == len(parts)
    sums = state if whole else state.new_empty(made.num_walks, heads, dk, dv, dtype=torch.float32)

    def go(count: int, output: bool) -> None:
        walk[(-(-dv // launch.values), heads, count)](
            *(q, k, v, out, state, sums, made.walks, made.followed, made.sources),
            *(made.firsts, made.stops, made.slots, slopes, scale),
            *(*_strides(q, k, v), heads * dk * dv),
            DK=dk, DV=dv, BK=max(16, power_of_two(dk)), BV=launch.values, CHUNK=launch.chunk,
            OUTPUT=output, FROM_SLOT=whole, EXACT=_exact(q.dtype, state.dtype),
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip

    if not whole:
        go(made.num_followed, output=False)
        scan[(-(-dk * dv // SCAN_BLOCK), heads, len(parts))](
            *(state, sums, made.rows, made.sources, length, slopes, heads * dk * dv),
            SIZE=dk * dv, BLOCK=SCAN_BLOCK, num_warps=4,
        )  # fmt: skip
    go(made.num_walks, output=True)
    return out


def _exact(given: torch.dtype, kept: torch.dtype) -> bool:
    """Values times their decay do not fit a narrow dtype; a state kept in float32 is to have them
    as they are, so the rest is added by a GEMM of its own."""
    return given != torch.float32 and kept == torch.float32


def _walks(parts: PrefillParts, length: int, device: torch.device) -> Walks:
    walks, followed, rows = [0], [], [0]
    legs: list[tuple[int, int, int]] = []
    for at, row in parts:
        for part in _legs(at.start, at.stop, row, length):
            legs += part
            followed.append(len(walks) - 1)
            walks.append(len(legs))
        followed.pop()
        rows.append(len(walks) - 1)
    sources = [NO_SLOT if row.source is None else row.source for _, row in parts]
    columns = (walks, followed, rows, sources, *zip(*legs, strict=True))
    return Walks(len(walks) - 1, len(followed), *copied(columns, device))


def _legs(
    first: int, stop: int, row: StateRow, length: int
) -> Iterator[list[tuple[int, int, int]]]:
    """(first token, last, slot) of the legs of each walk of a row."""
    writes = sorted((first + end - row.start, slot) for end, slot in row.writes(stop - first))
    for begin in range(first, stop, length):
        end, legs = min(begin + length, stop), []
        while writes and writes[0][0] <= end:
            reached, slot = writes.pop(0)
            legs.append((begin, reached, slot))
            begin = reached
        if begin < end:
            legs.append((begin, end, NO_SLOT))
        yield legs
