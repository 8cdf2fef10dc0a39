"""Tokens of a run share the keys they read where they have few heads and choose nothing; with many
heads, or lists, each has programs of its own. Where that makes few programs, keys are split."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.cache.store import LatentView
from trueline.device import send
from trueline.ops.launch import copied, num_sms, power_of_two, unit_stride
from trueline.ops.mla_decode import Tiling
from trueline.ops.sink_attention import IMPLEMENTATIONS, SinkRows, SinkTable
from trueline.ops.sink_attention.kernels import attend, merge

capabilities = IMPLEMENTATIONS["triton"]

LEAST = 16
"""Rows and columns of an MMA."""
SHARE = 8
"""Tokens of a run that share keys, at most."""
FEW_SPLITS, MOST_SPLITS = 4, 32
"""That are added up: a kernel of its own for a few."""
CHUNK = 1024
"""Of a list, looked at together."""


@dataclass(frozen=True, slots=True)
class SinkLaunch:
    tokens: int
    """Of a program."""
    heads: int
    tile: int
    splits: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    window: Tensor  # [rows, most]
    entries: Tensor | None  # [rows, most]
    lengths: Tensor  # [n]
    tokens_per_row: int
    runs: Tensor | None  # [n]; None: as many tokens in each row
    counts: tuple[int, ...]
    """Of the runs, where the host knows them."""
    most_entries: int
    """That a token may see."""
    size: int
    ratio: int
    made: dict[int, Tensor] = field(default_factory=dict)
    """Groups, by tokens: made by the first layer that asks, for all."""

    def groups(self, tokens: int) -> Tensor:
        """[groups, 2]: first token and count, of one run each."""
        if tokens not in self.made:
            found, first = [], 0
            for count in self.counts:
                found += [(first + i, min(tokens, count - i)) for i in range(0, count, tokens)]
                first += count
            made = torch.tensor(found, dtype=torch.int32, device="cpu")
            self.made[tokens] = send(made, self.lengths.device)
        return self.made[tokens]


def launch(
    rows: int, shared: int, heads: int, keys: int, dtype: torch.dtype, sms: int
) -> SinkLaunch:
    """`shared`: tokens that may share keys; `keys`: the most of a token."""
    each, per_sm, least = max(power_of_two(heads), LEAST), 1, 2
    if dtype == torch.float32:  # no tensor cores: what fits into registers
        most, tile, warps, stages = 16, 16, 8, 1
    elif shared == 1 and rows * -(-heads // 64) < sms:  # a few programs of many heads would be slow
        most, tile, warps, stages, per_sm, least = 16, 32, 4, 2, 2, 1
    elif each * shared >= 64:
        most, tile, warps, stages = 64, 64, 8, 2
    else:
        most, tile, warps, stages = 32, 32, 4, 3
    each = min(each, most)
    tokens = min(shared, most // each)
    programs = -(-rows // tokens) * -(-heads // each)
    splits = min(per_sm * sms // programs, -(-keys // (least * tile)), MOST_SPLITS)
    return SinkLaunch(tokens, each, tile, max(splits, 1), warps, stages)


def prepare(
    rows: SinkRows | SinkTable,
    window: LatentView,
    entries: LatentView | None,
    tiling: Tiling,
    *,
    size: int,
    ratio: int,
) -> Prepared:
    """Tiles are the launch's: full ones are asked for only in the mode that is refused."""
    if isinstance(rows, SinkTable):
        most = 0
        if entries is not None:
            assert rows.entries is not None
            most = rows.entries.shape[1] * entries.layout.block_size
        return Prepared(
            window=rows.window,
            entries=rows.entries,
            lengths=rows.lengths,
            tokens_per_row=rows.tokens_per_row,
            runs=None,
            counts=(),
            most_entries=most,
            size=size,
            ratio=ratio,
        )
    lengths = [run.start + i + 1 for run in rows.runs for i in range(run.count)]
    near, far, runs, seen = copied(
        (
            _padded([run.window for run in rows.runs]),
            _padded([run.entries for run in rows.runs]),
            [i for i, run in enumerate(rows.runs) for _ in range(run.count)],
            lengths,
        ),
        window.rows.device,
    )
    count = max(len(rows.runs), 1)
    return Prepared(
        window=near.view(count, -1),
        entries=far.view(count, -1) if entries is not None else None,
        lengths=seen,
        tokens_per_row=1,
        runs=runs,
        counts=tuple(run.count for run in rows.runs),
        most_entries=max(lengths, default=0) // ratio if ratio else 0,
        size=size,
        ratio=ratio,
    )


def _padded(tables: list[list[int]]) -> list[int]:
    most = max(map(len, tables), default=0) or 1
    return [block for ids in tables for block in (*ids, *[0] * (most - len(ids)))]


def run(
    q: Tensor,
    window: LatentView,
    entries: LatentView | None,
    prepared: Prepared,
    *,
    sinks: Tensor,
    softmax_scale: float,
    chosen: Tensor | None,
    how: SinkLaunch | None = None,
) -> Tensor:
    n, heads, dim = q.shape
    q = unit_stride(q)
    out = q.new_empty(n, heads, dim)
    if not n:
        return out
    chosen = None if chosen is None else unit_stride(chosen)
    far = prepared.most_entries if chosen is None else chosen.shape[1]
    if how is None:
        shared = 1 if chosen is not None else max(prepared.counts, default=1)
        shared = min(power_of_two(shared), SHARE)
        how = launch(n, shared, heads, prepared.size + far, q.dtype, num_sms(q.device))
    groups = None if how.tokens == 1 else prepared.groups(how.tokens)
    partials = how.splits if how.splits > 1 else 0
    partial_out = q.new_empty(n, heads, partials, dim, dtype=torch.float32)
    partial_lse = q.new_empty(n, heads, partials, dtype=torch.float32)
    far_table = prepared.entries
    attend[(n if groups is None else len(groups), -(-heads // how.heads), how.splits)](
        *(q, _rows(window), None if entries is None else _rows(entries), prepared.window),
        *(far_table, prepared.lengths, groups, prepared.runs, chosen, sinks, out),
        *(partial_out, partial_lse, softmax_scale * math.log2(math.e), heads, how.splits),
        *(prepared.tokens_per_row, prepared.window.stride(0)),
        *(0 if far_table is None else far_table.stride(0), far if chosen is not None else 0),
        *(0 if chosen is None else chosen.stride(0), *q.stride()[:2]),
        WINDOW=prepared.size,
        RATIO=prepared.ratio,
        WINDOW_BLOCK=window.layout.block_size,
        ENTRY_BLOCK=1 if entries is None else entries.layout.block_size,
        DIM=dim,
        D=max(power_of_two(dim), LEAST),
        TOKENS=how.tokens,
        HEADS=how.heads,
        SPLIT=how.splits > 1,
        TILE=how.tile,
        CHUNK=min(max(power_of_two(far), LEAST), CHUNK) if chosen is not None else LEAST,
        STAGES=how.stages,
        num_warps=how.warps,
        num_stages=how.stages,
    )
    if how.splits > 1:
        merge[(n, heads)](
            *(partial_out, partial_lse, sinks, out, heads, how.splits),
            DIM=dim, D=power_of_two(dim), num_warps=4,
            MOST=FEW_SPLITS if how.splits <= FEW_SPLITS else MOST_SPLITS,
        )  # fmt: skip
    return out


def _rows(view: LatentView) -> Tensor:
    assert view.layout.fp8 is None, "cache rows as they are computed"
    assert view.rows.is_contiguous()
    return view.rows
