"""Latent attention on one GPU: numbers at real shapes, and times of every way to cut it.

    python -m trueline.bench.gpu.kernels.attention [--quick] [--engine] [--out FILE.json]

What is timed is compiled in several processes at once first. tests/gpu/test_gpu.py has the checks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import asked, graph_time
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.device import compute_capability
from trueline.layers.context import PrefillSlice
from trueline.ops.batched_gemm import triton as batched_gemm
from trueline.ops.capabilities import Context, HeadDims
from trueline.ops.mla_decode import DecodeTable, Tiling
from trueline.ops.mla_decode import triton as decode
from trueline.ops.mla_decode.launch_plan import LaunchPlan, launch
from trueline.ops.mla_prefill import HeadWeights, PrefillRow
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.registry import OPS, implementation, refusals
from trueline.ops.sparse_mla import triton as sparse
from trueline.ops.sparse_rows import Run, SparseRows, Table

HERE = Path(__file__).parent
READ = 4.39e12
BF16 = torch.bfloat16
LAYOUT = LatentLayout(512, 64, 64)
WIDTH = LAYOUT.width
NOPE, VALUE = 128, 128
TILING = Tiling(64, full=False)
SCALE = 0.1
BUSY = 400 << 20
"""Bytes that no cache holds: calls go over at least as many in turn."""
GATE = 8e-3
DECODE = (
    *((16, 1, n) for n in (1024, 8192, 32768)),
    *((16, rows, n) for rows in (16, 64, 256) for n in (1024, 8192)),
    *((128, rows, 8192) for rows in (1, 16, 64, 256)),
)
"""Heads, rows and context, as the peers were measured."""
TOPK, SEQUENCES, CONTEXT = 2048, 64, 32768
SPARSE = ((128, 1), (128, 16), (128, 64), (16, 16))
PREFILL = (
    *((16, 1, 0, 4096), (16, 8, 0, 4096), (128, 1, 0, 4096)),
    *((16, 1, 31744, 1024), (128, 1, 31744, 1024)),
)
"""Heads, rows, positions before and new ones."""
CHOSEN = ((8, 2048), (1, 6144), (1, 10240), (1, 14336))
"""Runs of 2048 tokens, and positions before them, of which TOPK are chosen."""
CHOOSING = 2048
FORMS = tuple((heads, 1, 16384, count) for heads in (16, 128) for count in (4, 16, 64))


# -- ways to cut ---------------------------------------------------------------------------


def plan(
    heads: int, head_tile: int, tile: int, warps: int, stages: int, per_sm: int, **more: Any
) -> LaunchPlan:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    groups = max(sms * per_sm // -(-heads // head_tile), 1)
    return LaunchPlan(heads, head_tile, tile, groups, warps, stages, **more)


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
            "32w4s2x3": plan(heads, 16, 32, 4, 2, 3, registers=168),
            "64w4s2x2": plan(heads, 16, 64, 4, 2, 2),
            "64w8s3x1": plan(heads, 16, 64, 8, 3, 1),
            "32w2s2x4": plan(heads, 16, 32, 2, 2, 4),
        }
        if rows <= 4:
            found["16w4s3x2"] = plan(heads, 16, 16, 4, 3, 2)
            found["16w4s3x2 least 1"] = plan(heads, 16, 16, 4, 3, 2, least=1)
            found["16w4s3x2 least 4"] = plan(heads, 16, 16, 4, 3, 2, least=4)
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


def prefill_plans(heads: HeadDims) -> dict[str, tuple[Any, prefill_cut.LaunchPlan]]:
    """Who runs, and how."""
    portable = prefill_cut.launch(heads, LAYOUT.rope, BF16)
    name = usual_name("mla_prefill", heads.count)
    best = prefill_cut.hopper_launch(heads, LAYOUT.rope, BF16) if name == "hopper" else portable
    usual = implementation("mla_prefill", name)
    return {
        "usual": (usual, best),
        "portable": (prefill, portable),
        "4 stages": (prefill, replace(portable, stages=4)),
        "32 keys": (prefill, replace(portable, keys=32, stages=4)),
        "64 queries": (prefill, replace(portable, queries=64, warps=4)),
        "all heads": (usual, replace(best, heads=heads.count)),
    }


# -- data ----------------------------------------------------------------------------------


@dataclass
class Work:
    ways: dict[str, list[Callable[[], Any]]]
    bytes: float = 0.0
    flops: float = 0.0
    exact: Callable[[Any], list[tuple[Tensor, Tensor]]] | None = None
    """Pairs that should be equal, of what a call returned."""
    peers: dict[str, float] = field(default_factory=dict)


class Pool:
    """Cached rows for whoever asks, drawn once."""

    def __init__(self) -> None:
        self.rows = torch.empty(0, WIDTH, dtype=BF16, device="cuda")

    def views(self, cells: int, most: int) -> list[LatentView]:
        """As many as take turns, of so many cells each."""
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
        torch.randn(heads, LAYOUT.latent, NOPE, dtype=BF16, device="cuda") / LAYOUT.latent**0.5,
        torch.randn(heads, VALUE, LAYOUT.latent, dtype=BF16, device="cuda") / LAYOUT.latent**0.5,
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
    ways = {}
    for label, made in decode_plans(heads, rows, context).items():
        op = (
            implementation("mla_decode", usual_name("mla_decode", heads))
            if label == "usual"
            else decode
        )
        prepared = decode.prepare(table, views[0], TILING, heads, plan=made)
        calls = [partial(op.run, q, v, prepared, softmax_scale=SCALE) for v in views]
        ways[label] = calls * (-(-4 // len(calls)))

    def exact(made: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        positions = torch.arange(context, device="cuda")
        return [
            (made[0][row], exact_row(q[row], views[0].rows[cells_of(table.blocks[row], positions)]))
            for row in {0, rows - 1}
        ]

    known = {
        each["peer"]: each["us"]
        for each in json.loads((HERE / "peers-h200.json").read_text())["mla_decode"]
        if (each["H"], each["B"], each["ctx"]) == (heads, rows, context)
    }
    pairs = rows * context
    return Work(ways, 2 * pairs * WIDTH, 2 * pairs * heads * (WIDTH + LAYOUT.latent), exact, known)


def sparse_work(heads: int, rows: int, pool: Pool) -> Work:
    """Rows of sequences that take turns."""
    view = pool.views(SEQUENCES * CONTEXT, 1)[0]
    table = shuffled_table(SEQUENCES, CONTEXT)
    q = torch.randn(rows, heads, WIDTH, dtype=BF16, device="cuda")
    lengths = torch.full((rows,), CONTEXT, device="cuda")
    turns = []
    for turn in range(max(SEQUENCES // rows, 4)):
        owner = torch.arange(turn * rows, (turn + 1) * rows, device="cuda") % SEQUENCES
        drawn = torch.rand(rows, CONTEXT, device="cuda").topk(TOPK).indices.sort().values
        turns.append(
            (Table(table.blocks[owner], torch.arange(rows, device="cuda"), lengths), drawn)
        )
    ways: dict[str, list[Callable[[], Any]]] = {}
    for label, made in decode_plans(heads, rows, TOPK).items():
        op = (
            implementation("sparse_mla", usual_name("sparse_mla", heads))
            if label == "usual"
            else sparse
        )
        calls: list[Callable[[], Any]] = []
        for of, drawn in turns:
            work = decode.split_schedule(lengths.clamp(max=TOPK).to(torch.int32), made)
            prepared = sparse.Prepared(of, {(heads, TOPK): work})
            calls.append(partial(op.run, q, view, prepared, drawn, softmax_scale=SCALE))
        ways[label] = calls

    def exact(made: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        of, drawn = turns[0]
        return [
            (made[0][row], exact_row(q[row], view.rows[cells_of(of.blocks[row], drawn[row])]))
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
    given: dict[str, tuple[Any, prefill.Prepared]] = {}
    dims = HeadDims(heads, NOPE, VALUE)
    if forms:
        op = implementation("mla_prefill", usual_name("mla_prefill", heads))
        beside = implementation("mla_decode", usual_name("mla_decode", heads))
        given = {
            form: (op, op.prepare(parts, view, dims, beside, form))
            for form in ("absorbed", "expanded")
        }
    else:
        for label, (op, made) in prefill_plans(dims).items():
            lists = prefill.lists(parts, made, view.rows.device)
            given[label] = op, prefill.Prepared([], None, lists)

    def call(op: Any, prepared: prefill.Prepared) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        q_nope, q_rope = q[..., :NOPE], q[..., NOPE:]
        op.run(q_nope, q_rope, view, prepared, weights, out, softmax_scale=SCALE)
        return out

    def exact(made: Tensor) -> list[tuple[Tensor, Tensor]]:
        kv = view.rows[cells_of(table.blocks[-1], torch.arange(end, device="cuda"))].float()
        pairs = []
        for token, head in ((0, 0), (count // 2, heads - 1), (count - 1, heads // 2)):
            seen = kv[: start + token + 1]
            latent, rope = seen[:, : LAYOUT.latent], seen[:, LAYOUT.latent :]
            keys = torch.cat((latent @ weights.key[head].float(), rope), 1)
            scores = SCALE * keys @ q[(rows - 1) * count + token, head].float()
            value = scores.softmax(0) @ latent @ weights.value[head].float().T
            pairs.append((made[(rows - 1) * count + token, head][None], value[None]))
        return pairs

    pairs = rows * sum(range(start + 1, end + 1))
    ways = {label: [partial(call, *each)] * 2 for label, each in given.items()}
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
    dims = HeadDims(heads, NOPE, VALUE)
    chooser = implementation("sparse_mla", usual_name("sparse_mla", heads))

    def masked(op: Any, prepared: prefill.Prepared) -> Tensor:
        out = q.new_empty(len(q), heads, VALUE)
        given = q[..., :NOPE], q[..., NOPE:], view, prepared, weights, out, positions
        op.run_chosen(*given, softmax_scale=SCALE)
        return out

    def selected() -> Tensor:
        batched_gemm.run(q[..., :NOPE], weights.key, wide[..., : LAYOUT.latent])
        u, _ = chooser.run(wide, view, listed, positions, softmax_scale=SCALE)
        return batched_gemm.run(u, weights.value)

    ways: dict[str, list[Callable[[], Any]]] = {}
    for label, (op, made) in prefill_plans(dims).items():
        prepared = prefill.prepare_chosen(parts, view, dims, made)
        ways[f"masked, {label}"] = [partial(masked, op, prepared)]
    ways["selected"] = [selected]

    def exact(made: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for token, head in ((0, 0), (count // 2, heads - 1), (count - 1, heads // 2)):
            row = (runs - 1) * count + token
            seen = view.rows[cells_of(table.blocks[-1], positions[row])].float()
            latent, rope = seen[:, : LAYOUT.latent], seen[:, LAYOUT.latent :]
            keys = torch.cat((latent @ weights.key[head].float(), rope), 1)
            scores = SCALE * keys @ q[row, head].float()
            value = scores.softmax(0) @ latent @ weights.value[head].float().T
            pairs.append((made[row, head][None], value[None]))
        return pairs

    pairs = runs * sum(range(start + 1, end + 1))
    return Work(ways, 0, 2 * pairs * heads * (NOPE + LAYOUT.rope + VALUE), exact)


def bits_work(runs: int, start: int, pool: Pool) -> Work:
    """What the mask takes by itself."""
    view = pool.views(runs * (start + CHOOSING), 1)[0]
    parts = slices(shuffled_table(runs, start + CHOOSING), start, CHOOSING)
    given = prefill.prepare_chosen(parts, view, HeadDims(1, NOPE, VALUE))
    positions = drawn_choices(runs, start)
    call = partial(prefill._bits, positions, given, len(positions))
    return Work({"bits": [call] * 4}, positions.nbytes)


Cell = tuple[str, Callable[[Pool], Work]]


def cells(quick: bool) -> Iterator[Cell]:
    for key in DECODE[::4] if quick else DECODE:
        yield "decode  {:>3} heads, {:>3} x {:>5}".format(*key), partial(decode_work, *key)
    for pair in SPARSE[:2] if quick else SPARSE:
        yield "sparse  {:>3} heads, {:>3} rows  ".format(*pair), partial(sparse_work, *pair)
    for four in PREFILL[:2] if quick else PREFILL:
        name = "prefill {:>3} heads, {} x {:>5} + {}".format(*four)
        yield name, partial(prefill_work, *four, forms=False)
    for runs, start in CHOSEN[:1] if quick else CHOSEN:
        name = f"chosen  128 heads, {runs} x {start:>5} + {CHOOSING}"
        yield name, partial(chosen_work, 128, runs, start)
    yield f"bits of choices, {CHOSEN[0][0]} x {CHOSEN[0][1]}", partial(bits_work, *CHOSEN[0])
    for four in () if quick else FORMS:
        name = "forms   {:>3} heads, {} x {:>5} + {}".format(*four)
        yield name, partial(prefill_work, *four, forms=True)


# -- running -------------------------------------------------------------------------------


def compile_cell(index: int, quick: bool) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    name, make = list(cells(quick))[index]
    failed = []
    try:
        for label, calls in asked(make(Pool()).ways.items()):
            try:
                calls[0]()
            except Exception as error:
                failed.append(f"FAIL {name} {label}: {last_line(error)}")
        torch.cuda.synchronize()
    except Exception as error:
        failed.append(f"FAIL {name}: {last_line(error)}")
    return failed


def last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)


def measure(name: str, made: Work) -> dict[str, Any]:
    times: dict[str, float] = {}
    for label, calls in asked(made.ways.items()):
        try:
            if made.exact is not None:
                verify(f"{name} {label}", made.exact(calls[0]()))
            times[label] = graph_time(calls)
        except Exception as error:
            print(f"FAIL {name} {label}: {last_line(error)}", flush=True)
            torch.cuda.synchronize()
    if not times:
        return {"cell": name, "us": times}
    best = min(times, key=lambda label: times[label])
    us = times[best]
    line = f"{name:<34} {best:<16} {us:8.1f} µs"
    if made.bytes:
        line += f" {made.bytes / us / 1e3:5.0f} GB/s ({made.bytes / READ * 1e6 / us:4.0%})"
    line += f" {made.flops / us / 1e6:4.0f} TFLOP/s"
    if made.peers:
        peer, theirs = min(made.peers.items(), key=lambda each: each[1])
        vllm = made.peers["vLLM triton"]
        line += f"  {us / theirs:.2f} of {peer} {theirs:.1f}, {us / vllm:.2f} of vLLM {vllm:.1f}"
    print(line, " ".join(f"[{label} {t:.1f}]" for label, t in times.items()), flush=True)
    return {"cell": name, "best": best, "us": times, "peers": made.peers}


def verify(what: str, pairs: list[tuple[Tensor, Tensor]]) -> None:
    for ours, exact in pairs:
        error = (ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
        worst = float(error.max())
        if not worst <= GATE:
            print(f"FAIL {what}: off by {worst:.2g}, accepted {GATE}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--engine", action="store_true", help="only what the engine takes")
    parser.add_argument("--only", default="", help="cells whose name begins so")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    todo = [(i, *cell) for i, cell in enumerate(cells(options.quick))]
    todo = [each for each in todo if each[1].startswith(options.only)]
    # Cells of one kind and as many heads compile the same kernels, but for the first and the last.
    first = {name.split(",")[0]: i for i, name, _ in reversed(todo)}
    last = {name.split(",")[0]: i for i, name, _ in todo}
    kinds = {*first.values(), *last.values()}
    with ProcessPoolExecutor(len(kinds), get_context("spawn")) as pool:
        futures = [pool.submit(compile_cell, i, options.quick) for i in kinds]
        for future in futures:
            for told in future.result():
                print(told, flush=True)
    rows, results = Pool(), []
    for _, name, make in todo:
        try:
            results.append(measure(name, make(rows)))
        except Exception as error:
            print(f"FAIL {name}: {last_line(error)}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
