"""A group of channels, or several narrow ones, per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from trueline.ops.gated_norm import IMPLEMENTATIONS
from trueline.ops.jit import kernel, pdl_wait
from trueline.ops.latent_write import Parts
from trueline.ops.launch import power_of_two, unit_stride
from trueline.ops.rms_norm.triton import launch
from trueline.ops.triton_utils import inverse_rms, weighted

capabilities = IMPLEMENTATIONS["triton"]


@kernel(do_not_specialize=["rows"])
def norm_groups(
    x, gate, weight, out, eps, rows, groups, x_row, gate_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    i = tl.arange(0, BLOCK)
    within = (row < rows)[:, None] & (i < WIDTH)[None, :]
    token, channel = (row // groups)[:, None], (row % groups)[:, None] * WIDTH + i[None, :]
    given = tl.load(x + token * x_row + channel, mask=within, other=0.0)
    opened = tl.load(gate + token * gate_row + channel, mask=within, other=0.0)
    scale = tl.load(weight + channel, mask=within, other=0.0)
    numbers = given.to(tl.float32)
    unit = inverse_rms(tl.sum(numbers * numbers, axis=1), eps, WIDTH)
    scaled = weighted(numbers * unit[:, None], scale, given.dtype)
    opened = tl.sigmoid(opened.to(tl.float32)).to(given.dtype).to(tl.float32)
    tl.store(out + row[:, None] * WIDTH + i[None, :], scaled * opened, mask=within)


def run(
    x: Tensor, gate: Tensor, *, weight: Tensor, groups: int, eps: float, parts: Parts
) -> Tensor:
    x, gate = unit_stride(x), unit_stride(gate)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, width = len(x) * groups, x.shape[1] // groups
    chosen = launch(width)
    norm_groups[(-(-rows // chosen.rows),)](
        *(x, gate, weight, out, eps, rows, groups, x.stride(0), gate.stride(0)),
        WIDTH=width, BLOCK=power_of_two(width), ROWS=chosen.rows, num_warps=chosen.warps,
    )  # fmt: skip
    return out
