"""Latent attention at published shapes: the launch plans to compare, the data, and what one call of
each runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import recorded
from trueline.cache.kinds.latent import PrefillSlice
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.device import compute_capability
from trueline.ops.batched_gemm import triton as batched_gemm
from trueline.ops.capabilities import Context, HeadDims
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_decode.split_schedule import split_schedule
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.registry import OPS, REGISTRY, refusals
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


def usual_name(op: str, heads: int) -> str:
    """The implementation that the plan of an engine would take here."""
    context = Context(
        dtype=BF16,
        device="cuda",
        compute_capability=compute_capability(),
        heads=HeadDims(heads, NOPE, VALUE),
        latent=LAYOUT,
    )
    return next(name for name in OPS[op] if not refusals(op, name, context))


def decode_plans(heads: int, rows: int, context: int) -> dict[str, LaunchPlan]:
    """`usual` is for the usual implementation, all others for the portable one."""
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
            "portable": usual,
            "64x64w8s2": plan(heads, 64, 64, 8, 2, 1),
            "64x32w8s3": plan(heads, 64, 32, 8, 3, 1),
            "64x32w8s4": plan(heads, 64, 32, 8, 4, 1),
            "32x64w8s2": plan(heads, 32, 64, 8, 2, 1),
            "16x64w4s2x2": plan(heads, 16, 64, 4, 2, 2),
        }
    return found


def prefill_plans(heads: HeadDims) -> dict[str, tuple[Any, prefill_cut.PrefillLaunchPlan]]:
    """The implementation and the launch plan of each way."""
    portable = prefill_cut.launch(heads, LAYOUT.rope, BF16)
    name = usual_name("mla_prefill", heads.count)
    best = prefill_cut.hopper_launch(heads, LAYOUT.rope, BF16) if name == "hopper" else portable
    usual = REGISTRY.get("mla_prefill", name)
    return {
        "usual": (usual, best),
        "portable": (prefill, portable),
        "4 stages": (prefill, replace(portable, stages=4)),
        "32 keys": (prefill, replace(portable, keys=32, stages=4)),
        "64 queries": (prefill, replace(portable, queries=64, warps=4)),
        "all heads": (usual, replace(best, heads=heads.count)),
    }


# -- data ----------------------------------------------------------------------------------


Outputs = Tensor | tuple[Tensor, Tensor]
"""What a call returns: outputs, with their LSE where the op gives it."""
Pairs = list[tuple[Tensor, Tensor]]
OutputCalls = list[Callable[[], Outputs]]


@dataclass
class AttentionWork:
    ways: dict[str, OutputCalls]
    bytes: float = 0.0
    flops: float = 0.0
    exact: Callable[[Tensor], Pairs] | None = None
    """Pairs that should be equal, given the outputs of a call."""
    peers: dict[str, float] = field(default_factory=dict)


class LatentPool:
    """Cached rows that all cells share, drawn once."""

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


def decode_work(heads: int, rows: int, context: int, pool: LatentPool) -> AttentionWork:
    views = pool.views(rows * context, 20)
    table = shuffled_table(rows, context)
    q = torch.randn(rows, heads, WIDTH, dtype=BF16, device="cuda")
    ways: dict[str, OutputCalls] = {}
    for label, made in decode_plans(heads, rows, context).items():
        name = usual_name("mla_decode", heads) if label == "usual" else "triton"
        run = REGISTRY.get("mla_decode", name).run
        prepared = decode.prepare(table, views[0], TILING, heads, plan=made)
        calls: OutputCalls = [partial(run, q, v, prepared, softmax_scale=SCALE) for v in views]
        ways[label] = calls * (-(-4 // len(calls)))

    def exact(out: Tensor) -> Pairs:
        positions = torch.arange(context, device="cuda")
        return [
            (out[row], exact_row(q[row], views[0].rows[cells_of(table.blocks[row], positions)]))
            for row in {0, rows - 1}
        ]

    known = recorded("mla_decode", H=heads, B=rows, ctx=context)
    pairs = rows * context
    return AttentionWork(
        ways, 2 * pairs * WIDTH, 2 * pairs * heads * (WIDTH + LAYOUT.latent), exact, known
    )


def sparse_work(heads: int, rows: int, pool: LatentPool) -> AttentionWork:
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
        name = usual_name("sparse_mla", heads) if label == "usual" else "triton"
        run = REGISTRY.get("sparse_mla", name).run
        calls: OutputCalls = []
        for of, drawn in inputs:
            work = split_schedule(lengths.clamp(max=TOPK).to(torch.int32), made)
            prepared = sparse.Prepared(of, {(heads, TOPK): work})
            calls.append(partial(run, q, view, prepared, drawn, softmax_scale=SCALE))
        ways[label] = calls

    def exact(out: Tensor) -> Pairs:
        of, drawn = inputs[0]
        return [
            (out[row], exact_row(q[row], view.rows[cells_of(of.blocks[row], drawn[row])]))
            for row in {0, rows - 1}
        ]

    pairs = rows * TOPK
    return AttentionWork(
        ways, 2 * pairs * WIDTH, 2 * pairs * heads * (WIDTH + LAYOUT.latent), exact
    )


def prefill_work(
    heads: int, rows: int, start: int, count: int, pool: LatentPool, forms: bool
) -> AttentionWork:
    end = start + count
    view = pool.views(rows * end, 1)[0]
    table = shuffled_table(rows, end)
    q = torch.randn(rows * count, heads, NOPE + LAYOUT.rope, dtype=BF16, device="cuda") / 4
    weights = head_weights(heads)
    parts = slices(table, start, count)
    given: dict[str, tuple[Any, Any]] = {}
    dims = HeadDims(heads, NOPE, VALUE)
    if forms:
        op = REGISTRY.get("mla_prefill", usual_name("mla_prefill", heads))
        beside = REGISTRY.get("mla_decode", usual_name("mla_decode", heads))
        given = {
            form: (op, op.prepare(parts, view, dims, beside, form))
            for form in ("absorbed", "expanded")
        }
    else:
        for label, (op, made) in prefill_plans(dims).items():
            lists = prefill_cut.lists(parts, made, q.device)
            given[label] = op, prefill.Prepared([], None, lists)

    def call(op: Any, prepared: Any) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        q_nope, q_rope = q[..., :NOPE], q[..., NOPE:]
        op.run(q_nope, q_rope, view, prepared, weights, out, softmax_scale=SCALE)
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
        label: [partial(call, *each)] * 2 for label, each in given.items()
    }
    return AttentionWork(ways, 0, 2 * pairs * heads * (NOPE + LAYOUT.rope + VALUE), exact)


def drawn_choices(runs: int, start: int) -> Tensor:
    """[tokens, TOPK], each row's in order."""
    seen = start + 1 + torch.arange(CHOOSING, device="cuda")
    made = []
    for _ in range(runs):
        scores = torch.rand(CHOOSING, start + CHOOSING, device="cuda")
        scores.masked_fill_(torch.arange(start + CHOOSING, device="cuda") >= seen[:, None], -1)
        made.append(scores.topk(TOPK).indices.sort().values)
    return torch.cat(made)


def chosen_work(heads: int, runs: int, start: int, pool: LatentPool) -> AttentionWork:
    """Everything with a mask, keys and values made of all of it; against lists in the latent, with
    the GEMMs before and after."""
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
    dims = HeadDims(heads, NOPE, VALUE)
    chooser = REGISTRY.get("sparse_mla", usual_name("sparse_mla", heads))

    def masked(op: Any, prepared: Any) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        given = q[..., :NOPE], q[..., NOPE:], view, prepared, weights, out, positions
        op.run_chosen(*given, softmax_scale=SCALE)
        return out

    def selected() -> Tensor:
        batched_gemm.run(q[..., :NOPE], weights.key, wide[..., : LAYOUT.latent])
        u, _ = chooser.run(wide, view, listed, positions, softmax_scale=SCALE)
        return batched_gemm.run(u, weights.value)

    ways: dict[str, OutputCalls] = {}
    for label, (op, made) in prefill_plans(dims).items():
        prepared = prefill.prepare_chosen(parts, view, dims, made)
        ways[f"masked, {label}"] = [partial(masked, op, prepared)]
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
    return AttentionWork(ways, 0, 2 * pairs * heads * (NOPE + LAYOUT.rope + VALUE), exact)


def bits_work(runs: int, start: int, pool: LatentPool) -> AttentionWork:
    """What the mask takes by itself."""
    view = pool.views(runs * (start + CHOOSING), 1)[0]
    parts = slices(shuffled_table(runs, start + CHOOSING), start, CHOOSING)
    given = prefill.prepare_chosen(parts, view, HeadDims(1, NOPE, VALUE))
    positions = drawn_choices(runs, start)
    call = partial(prefill._bits, positions, given, len(positions))
    return AttentionWork({"bits": [call] * 4}, positions.nbytes)
