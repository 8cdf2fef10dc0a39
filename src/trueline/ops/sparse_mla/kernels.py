# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""From positions to cells."""

from __future__ import annotations

import triton.language as tl

from trueline.ops.jit import kernel, pdl_wait


@kernel(do_not_specialize=["width", "positions_row", "blocks_row"])
def look_up(
    positions, blocks, run, lengths, cells, counts, width, positions_row, blocks_row,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program per row: cells [rows, width] of the positions before the first -1, and how many
    there are; -1 if the row does not see one of them."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    table = blocks + tl.load(run + row) * blocks_row
    count = tl.zeros((), tl.int32)
    end = width
    unseen = tl.zeros((), tl.int32)
    for start in range(0, width, CHUNK):
        i = start + tl.arange(0, CHUNK)
        position = tl.load(positions + row * positions_row + i, mask=i < width, other=-1)
        end = tl.minimum(end, tl.min(tl.where(position < 0, i, width), 0))
        listed = i < end
        count += tl.sum(listed.to(tl.int32), 0)
        seen = listed & (position < length)
        unseen += tl.sum((listed & (position >= length)).to(tl.int32), 0)
        block = tl.load(table + position // BLOCK, mask=seen, other=0)
        tl.store(cells + row * width + i, block * BLOCK + position % BLOCK, mask=seen)
    tl.store(counts + row, tl.where(unseen > 0, -1, count))
