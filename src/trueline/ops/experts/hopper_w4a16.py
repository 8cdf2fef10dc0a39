"""int4 and fp4 on Hopper GPUs, activations in bfloat16 (W4A16). Weights are packed as the tensor
cores' threads want them (fragments.py), and dequantised in registers; each expert's are read once
for a tile of pairs. Weights whose scales are not for whole blocks of columns are
triton_quantised.py's."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from trueline.ops.experts import IMPLEMENTATIONS, quantised_kernels, triton_quantised
from trueline.ops.experts.fragments import CHUNK, STEP, TILE_ROWS, Fragments, fragments_of
from trueline.ops.experts.triton import More, sort_pairs, sum_pairs
from trueline.ops.launch import num_sms, power_of_two, unit_stride
from trueline.ops.linear import LinearOp
from trueline.weights.value import Weight

capabilities = IMPLEMENTATIONS["hopper_w4a16"]

STREAMED, MULTIPLIED = 8, (16, 32, 64, 128)
"""Pairs of one expert in a tile of what streams its weights, and in one of the GEMM."""
# As measured on an H200 with the widths of Kimi-K2.5 and DeepSeek-V4-Flash. So few pairs that
# streams do not fill the GPU; and pairs of an expert, in the mean, up to which its weights are
# streamed.
FEW_PAIRS, FEW_EACH = 32, 6
# Of a program that streams: steps of 256 columns that make up for its start; and programs that
# there should be all the same.
LONG_STREAM, MANY_PROGRAMS = 28, 4096
# Shared memory of a GEMM's program for what is copied ahead.
AHEAD_BYTES = 176 << 10
PERMUTED = 1024


@dataclass(frozen=True, slots=True)
class Packed:
    gate_up: Fragments
    down: Fragments
    limit: float | None

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def launch(tokens: int, top: int, experts: int) -> int:
    """Pairs of one expert in a tile: of a GEMM, one tile for nearly every expert."""
    mean = tokens * top / max(experts, 1)
    if tokens * top > FEW_PAIRS and mean <= FEW_EACH:
        return STREAMED
    rows = power_of_two(int(mean + 1.5 * mean**0.5) + 1)
    return min(max(rows, MULTIPLIED[0]), MULTIPLIED[-1])


def streamed(columns: int, steps: int, tiles: int, long: int = LONG_STREAM) -> int:
    """Tiles of an expert's rows that a program streams."""
    return max(min(long // steps, tiles * columns // MANY_PROGRAMS, columns), 1)


def pack(
    gate_up: Weight | Tensor, down: Weight | Tensor, linear: LinearOp, limit: float | None = None
) -> Packed | triton_quantised.Packed:
    assert isinstance(gate_up, Weight), "the plan chose it for a quantised format"
    assert isinstance(down, Weight), "the plan chose it for a quantised format"
    first, second = fragments_of(gate_up, gated=True), fragments_of(down, gated=False)
    if first is None or second is None:
        return triton_quantised.pack(gate_up, down, linear, limit)
    return Packed(first, second, limit)


def run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed | triton_quantised.Packed,
    linear: LinearOp,
    first: int = 0,
) -> Tensor:
    if isinstance(packed, triton_quantised.Packed):
        return triton_quantised.run(x, ids, weights, packed, linear, first)
    return run_with(_launched(x, ids, packed), x, ids, weights, packed, first)


def run_added(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    more: More,
    packed: Packed | triton_quantised.Packed,
    linear: LinearOp,
    first: int = 0,
) -> Tensor:
    if isinstance(packed, triton_quantised.Packed):
        return triton_quantised.run_added(x, ids, weights, more, packed, linear, first)
    return run_with(_launched(x, ids, packed), x, ids, weights, packed, first, more=more)


def _launched(x: Tensor, ids: Tensor, packed: Packed) -> int:
    return launch(len(x), ids.shape[1], len(packed.down.words))


def run_with(
    rows: int,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    packed: Packed,
    first: int = 0,
    long: int = LONG_STREAM,
    more: More | None = None,
) -> Tensor:
    x, ids, weights = unit_stride(x), ids.contiguous(), weights.contiguous()
    hidden, top, pairs = x.shape[1], ids.shape[1], ids.numel()
    experts = len(packed.down.words)
    held, choices = (first, experts), {"TOP": top, "SHARED": 0}
    order = sort_pairs(ids, experts, pairs, held, choices, rows)
    added = None if more is None else more()
    parts = x.new_empty(pairs, hidden)
    if rows == STREAMED:
        _stream(x, packed, weights, parts, order, top, long)
    else:
        _gemm(x, packed, weights, parts, order, top, rows)
    out = x.new_empty(len(x), hidden)
    sum_pairs(parts, ids, held, choices, out, added)
    return out


Order = tuple[Tensor, Tensor, Tensor]


def _stream(
    x: Tensor, packed: Packed, weights: Tensor, parts: Tensor, order: Order, top: int, long: int
) -> None:
    from trueline.ops.experts.w4a16_stream import stream_fragments  # Gluon is not everywhere

    middle = x.new_empty(len(parts), packed.down.columns)
    for gated, source, weight, out in (
        (True, x, packed.gate_up, middle),
        (False, middle, packed.down, parts),
    ):
        columns, depth = weight.words.shape[1], weight.columns
        each = 1 if weight.tail else streamed(columns, depth // STEP, len(order[1]), long)
        stream_fragments[(triton.cdiv(columns, each), len(order[1]))](
            *(source, source.stride(0), weight.words, weight.scales, *order, weights, out),
            *(len(parts), depth, out.shape[1], each, columns),
            **_compiled(weight, top, packed.limit, gated=gated),
        )


def _gemm(
    x: Tensor, packed: Packed, weights: Tensor, parts: Tensor, order: Order, top: int, rows: int
) -> None:
    from trueline.ops.experts.w4a16_gemm import grouped_gemm  # Gluon is not everywhere

    ordered = x.new_empty(len(x), packed.gate_up.words.shape[2] * CHUNK)
    quantised_kernels.permute_columns[(len(x), triton.cdiv(ordered.shape[1], PERMUTED))](
        x, x.stride(0), ordered, ordered.shape[1], x.shape[1], BLOCK=PERMUTED
    )
    # columns that no tile of the gate's rows writes are multiplied with zeros
    width = packed.down.words.shape[2] * CHUNK
    whole = packed.gate_up.words.shape[1] * TILE_ROWS // 2 == width
    middle = (x.new_empty if whole else x.new_zeros)(len(parts), width)
    for gated, source, weight, out in (
        (True, ordered, packed.gate_up, middle),
        (False, middle, packed.down, parts),
    ):
        grouped_gemm[(num_sms(x.device),)](
            *(source, source.shape[1], weight.words, weight.scales, *order, weights, out),
            *(len(parts), weight.columns, out.shape[1], weight.words.shape[1]),
            **_compiled(weight, top, packed.limit, gated=gated),
            T=rows,
            STAGES=AHEAD_BYTES // (2 * CHUNK * (rows + TILE_ROWS // 2)),
            HALVE=rows >= TILE_ROWS,
        )


def _compiled(
    weight: Fragments, top: int, limit: float | None, *, gated: bool
) -> dict[str, object]:
    """What both kernels are compiled for."""
    return {
        "TOP": top,
        "GATED": gated,
        "LIMIT": limit if gated else None,
        "FORM": weight.form,
        "GROUP": weight.group,
        "STEPS": weight.columns >= STEP,
        "TAIL": weight.tail,
    }
