"""Latent attention at published shapes: the launch plans to compare, the data, and what one call of
each runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import recorded
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.layers.context import PrefillSlice
from trueline.ops.head_product import triton as head_product
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_decode.work import work_list
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.sparse_mla import triton as sparse
from trueline.ops.sparse_rows import Run, SparseRows, Table

BF16 = torch.bfloat16
LAYOUT = LatentLayout(512, 64, 64)
WIDTH = LAYOUT.width
NOPE, VALUE = 128, 128
TILING = Tiling(64, full=False)
SCALE = 0.1
BUSY = 400 << 20
"""Bytes that no cache holds: calls alternate between inputs of at least as many."""
TOPK, SEQUENCES, CONTEXT = 2048, 64, 32768
CHOOSING = 2048
"""Tokens of a run that chooses positions."""


# -- ways to cut ---------------------------------------------------------------------------


def plan(heads: int, head_tile: int, tile: int, warps: int, stages: int, per_sm: int) -> LaunchPlan:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return LaunchPlan(
        heads=heads,
        head_tile=head_tile,
        tile=tile,
        groups=max(sms * per_sm // -(-heads // head_tile), 1),
        warps=warps,
        stages=stages,
    )


def decode_plans(heads: int, rows: int, context: int) -> dict[str, LaunchPlan]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    usual = launch(heads, LAYOUT, BF16, sms, rows, context)
    found = {"usual": usual}
    if heads <= 16:
        found |= {
            "32w4s2x2": plan(heads, 16, 32, 4, 2, 2),
            "32w4s3x2": plan(heads, 16, 32, 4, 3, 2),
            "32w4s2x3": replace(plan(heads, 16, 32, 4, 2, 3), registers=168),
            "64w4s2x2": plan(heads, 16, 64, 4, 2, 2),
            "64w8s3x1": plan(heads, 16, 64, 8, 3, 1),
            "32w2s2x4": plan(heads, 16, 32, 2, 2, 4),
        }
        if rows <= 4:
            narrow = found["16w4s3x2"] = plan(heads, 16, 16, 4, 3, 2)
            found["16w4s3x2 least 1"] = replace(narrow, least=1)
            found["16w4s3x2 least 4"] = replace(narrow, least=4)
    else:
        found |= {
            "portable": replace(usual, paired=False),
            "64x64w8s2": plan(heads, 64, 64, 8, 2, 1),
            "64x32w8s3": plan(heads, 64, 32, 8, 3, 1),
            "64x32w8s4": plan(heads, 64, 32, 8, 4, 1),
            "32x64w8s2": plan(heads, 32, 64, 8, 2, 1),
            "16x64w4s2x2": plan(heads, 16, 64, 4, 2, 2),
        }
    return found


def prefill_plans(weights: HeadWeights) -> dict[str, prefill_cut.LaunchPlan]:
    usual = prefill_cut.launch(weights, LAYOUT.rope)
    portable = replace(usual, keys=64, warps=8, stages=3, paired=False)
    return {
        "usual": usual,
        "portable": portable,
        "4 stages": replace(portable, stages=4),
        "32 keys": replace(portable, keys=32, stages=4),
        "64 queries": replace(portable, queries=64, warps=4),
        "all heads": replace(usual, heads=len(weights.key)),
    }


# -- data ----------------------------------------------------------------------------------


Outputs = Tensor | tuple[Tensor, Tensor]
"""What a call returns: outputs, with their LSE where the op gives it."""
Pairs = list[tuple[Tensor, Tensor]]
OutputCalls = list[Callable[[], Outputs]]


@dataclass
class Work:
    ways: dict[str, OutputCalls]
    bytes: float = 0.0
    flops: float = 0.0
    exact: Callable[[Tensor], Pairs] | None = None
    """Pairs that should be equal, given the outputs of a call."""
    peers: dict[str, float] = field(default_factory=dict)


class Pool:
    """Cached rows for whoever asks, drawn once."""

    def __init__(self) -> None:
        self.rows = torch.empty(0, WIDTH, dtype=BF16, device="cuda")

    def views(self, cells: int, most: int) -> list[LatentView]:
        """As many as calls alternate between, of so many cells each."""
        cells = -(-cells // LAYOUT.block_size) * LAYOUT.block_size
        count = min(max(-(-BUSY // (2 * cells * WIDTH)), 1), most)
        if len(self.rows) < count * (cells + 1):
            self.rows = torch.randn(count * (cells + 1), WIDTH, dtype=BF16, device="cuda")
        parts = self.rows[: count * (cells + 1)].view(count, cells + 1, WIDTH)
        return [LatentView(part, LAYOUT, cells) for part in parts]


def shuffled_table(rows: int, context: int) -> DecodeTable:
    blocks = torch.randperm(rows * -(-context // LAYOUT.block_size), device="cuda").to(torch.int32)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    return DecodeTable(lengths, blocks.view(rows, -1))


def slices(table: DecodeTable, start: int, count: int) -> list[PrefillSlice]:
    """A run of new positions of every row, one after the other."""
    return [
        PrefillSlice(slice(i * count, (i + 1) * count), PrefillRow(start, count, ids), i * count)
        for i, ids in enumerate(table.blocks.tolist())
    ]


def head_weights(heads: int) -> HeadWeights:
    return HeadWeights(
        torch.randn(heads, LAYOUT.latent, NOPE, dtype=BF16, device="cuda")
        / math.sqrt(LAYOUT.latent),
        torch.randn(heads, VALUE, LAYOUT.latent, dtype=BF16, device="cuda")
        / math.sqrt(LAYOUT.latent),
    )


def cells_of(blocks: Tensor, positions: Tensor) -> Tensor:
    size = LAYOUT.block_size
    return blocks[positions // size].long() * size + positions % size


def exact_row(q: Tensor, keys: Tensor) -> Tensor:
    scores = SCALE * q.float() @ keys.float().T
    return scores.softmax(-1) @ keys[:, : LAYOUT.latent].float()


# -- what a cell runs ----------------------------------------------------------------------


def decode_work(heads: int, rows: int, context: int, pool: Pool) -> Work:
    views = pool.views(rows * context, 20)
    table = shuffled_table(rows, context)
    q = torch.randn(rows, heads, WIDTH, dtype=BF16, device="cuda")
    ways: dict[str, OutputCalls] = {}
    for label, made in decode_plans(heads, rows, context).items():
        prepared = decode.prepare(table, views[0], TILING, heads, plan=made)
        calls: OutputCalls = [
            partial(decode.run, q, v, prepared, softmax_scale=SCALE) for v in views
        ]
        ways[label] = calls * (-(-4 // len(calls)))

    def exact(out: Tensor) -> Pairs:
        positions = torch.arange(context, device="cuda")
        return [
            (out[row], exact_row(q[row], views[0].rows[cells_of(table.blocks[row], positions)]))
            for row in {0, rows - 1}
        ]

    known = recorded("mla_decode", H=heads, B=rows, ctx=context)
    pairs = rows * context
    return Work(ways, 2 * pairs * WIDTH, 2 * pairs * heads * (WIDTH + LAYOUT.latent), exact, known)


def sparse_work(heads: int, rows: int, pool: Pool) -> Work:
    """Rows of other sequences in every call."""
    view = pool.views(SEQUENCES * CONTEXT, 1)[0]
    table = shuffled_table(SEQUENCES, CONTEXT)
    q = torch.randn(rows, heads, WIDTH, dtype=BF16, device="cuda")
    lengths = torch.full((rows,), CONTEXT, device="cuda")
    inputs = []
    for call in range(max(SEQUENCES // rows, 4)):
        owner = torch.arange(call * rows, (call + 1) * rows, device="cuda") % SEQUENCES
        drawn = torch.rand(rows, CONTEXT, device="cuda").topk(TOPK).indices.sort().values
        inputs.append(
            (Table(table.blocks[owner], torch.arange(rows, device="cuda"), lengths), drawn)
        )
    ways: dict[str, OutputCalls] = {}
    for label, made in decode_plans(heads, rows, TOPK).items():
        calls: OutputCalls = []
        for of, drawn in inputs:
            work = work_list(lengths.clamp(max=TOPK).to(torch.int32), made)
            prepared = sparse.Prepared(of, {(heads, TOPK): work})
            calls.append(partial(sparse.run, q, view, prepared, drawn, softmax_scale=SCALE))
        ways[label] = calls

    def exact(out: Tensor) -> Pairs:
        of, drawn = inputs[0]
        return [
            (out[row], exact_row(q[row], view.rows[cells_of(of.blocks[row], drawn[row])]))
            for row in {0, rows - 1}
        ]

    pairs = rows * TOPK
    return Work(ways, 2 * pairs * WIDTH, 2 * pairs * heads * (WIDTH + LAYOUT.latent), exact)


def prefill_work(heads: int, rows: int, start: int, count: int, pool: Pool, forms: bool) -> Work:
    end = start + count
    view = pool.views(rows * end, 1)[0]
    table = shuffled_table(rows, end)
    q = torch.randn(rows * count, heads, NOPE + LAYOUT.rope, dtype=BF16, device="cuda") / 4
    weights = head_weights(heads)
    parts = slices(table, start, count)
    given: dict[str, prefill.Prepared] = {}
    if forms:
        given = {
            form: prefill.prepare(parts, view, weights, form) for form in ("absorbed", "expanded")
        }
    else:
        for label, made in prefill_plans(weights).items():
            given[label] = prefill.Prepared([], None, prefill_cut.lists(parts, made, q.device))

    def call(prepared: prefill.Prepared) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        prefill._attend(q[..., :NOPE], q[..., NOPE:], view, prepared, weights, out, SCALE)
        return out

    def exact(out: Tensor) -> Pairs:
        kv = view.rows[cells_of(table.blocks[-1], torch.arange(end, device="cuda"))].float()
        pairs: Pairs = []
        for token, head in ((0, 0), (count // 2, heads - 1), (count - 1, heads // 2)):
            seen = kv[: start + token + 1]
            latent, rope = seen[:, : LAYOUT.latent], seen[:, LAYOUT.latent :]
            keys = torch.cat((latent @ weights.key[head].float(), rope), 1)
            scores = SCALE * keys @ q[(rows - 1) * count + token, head].float()
            value = scores.softmax(0) @ latent @ weights.value[head].float().T
            pairs.append((out[(rows - 1) * count + token, head][None], value[None]))
        return pairs

    pairs = rows * sum(range(start + 1, end + 1))
    ways: dict[str, OutputCalls] = {
        label: [partial(call, each)] * 2 for label, each in given.items()
    }
    return Work(ways, 0, 2 * pairs * heads * (NOPE + LAYOUT.rope + VALUE), exact)


def drawn_choices(runs: int, start: int) -> Tensor:
    """[tokens, TOPK], each row's in order."""
    seen = start + 1 + torch.arange(CHOOSING, device="cuda")
    made = []
    for _ in range(runs):
        scores = torch.rand(CHOOSING, start + CHOOSING, device="cuda")
        scores.masked_fill_(torch.arange(start + CHOOSING, device="cuda") >= seen[:, None], -1)
        made.append(scores.topk(TOPK).indices.sort().values)
    return torch.cat(made)


def chosen_work(heads: int, runs: int, start: int, pool: Pool) -> Work:
    """Everything with a mask, keys and values made of all of it; against lists in the latent, with
    the products before and after."""
    count, end = CHOOSING, start + CHOOSING
    view = pool.views(runs * end, 1)[0]
    table = shuffled_table(runs, end)
    q = torch.randn(runs * count, heads, NOPE + LAYOUT.rope, dtype=BF16, device="cuda") / 4
    wide = torch.empty(runs * count, heads, WIDTH, dtype=BF16, device="cuda")
    wide[..., LAYOUT.latent :] = q[..., NOPE:]
    weights, positions = head_weights(heads), drawn_choices(runs, start)
    parts = slices(table, start, count)
    rows = SparseRows(tuple(Run(part.row.block_ids, start + 1, count) for part in parts))
    listed = sparse.prepare(rows, view, TILING)
    usual = prefill.prepare(parts, view, weights, "chosen")

    def masked(cut: prefill_cut.Cut) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        bits = prefill._bits(positions, usual, len(q))
        q_nope, q_rope = q[..., :NOPE], q[..., NOPE:]
        prefill._expanded(q_nope, q_rope, view, cut, weights, out, SCALE, bits)
        return out

    def selected() -> Tensor:
        head_product.run(q[..., :NOPE], weights.key, wide[..., : LAYOUT.latent])
        u, _ = sparse.run(wide, view, listed, positions, softmax_scale=SCALE)
        return head_product.run(u, weights.value)

    ways: dict[str, OutputCalls] = {}
    for label, made in prefill_plans(weights).items():
        ways[f"masked, {label}"] = [partial(masked, prefill_cut.lists(parts, made, q.device))]
    ways["selected"] = [selected]

    def exact(out: Tensor) -> Pairs:
        pairs: Pairs = []
        for token, head in ((0, 0), (count // 2, heads - 1), (count - 1, heads // 2)):
            row = (runs - 1) * count + token
            seen = view.rows[cells_of(table.blocks[-1], positions[row])].float()
            latent, rope = seen[:, : LAYOUT.latent], seen[:, LAYOUT.latent :]
            keys = torch.cat((latent @ weights.key[head].float(), rope), 1)
            scores = SCALE * keys @ q[row, head].float()
            value = scores.softmax(0) @ latent @ weights.value[head].float().T
            pairs.append((out[row, head][None], value[None]))
        return pairs

    pairs = runs * sum(range(start + 1, end + 1))
    return Work(ways, 0, 2 * pairs * heads * (NOPE + LAYOUT.rope + VALUE), exact)


def bits_work(runs: int, start: int, pool: Pool) -> Work:
    """What the mask takes by itself."""
    view, weights = pool.views(runs * (start + CHOOSING), 1)[0], head_weights(1)
    parts = slices(shuffled_table(runs, start + CHOOSING), start, CHOOSING)
    given = prefill.prepare(parts, view, weights, "chosen")
    positions = drawn_choices(runs, start)
    call = partial(prefill._bits, positions, given, len(positions))
    return Work({"bits": [call] * 4}, positions.nbytes)
