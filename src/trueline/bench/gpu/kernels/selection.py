"""The indexer's ops and sampling on one GPU: times.

    python -m trueline.bench.gpu.kernels.selection [--quick] [--out FILE.json]

What is timed is compiled in several processes at once first. tests/gpu/test_gpu.py has the checks.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import Calls, Cell, Ways, graph_time, last_line
from trueline.bench.gpu.roofline import MULTIPLY, READ
from trueline.cache.index import IndexStore, IndexView
from trueline.cache.layout import IndexLayout
from trueline.ops.index_scores import triton as scores
from trueline.ops.index_write import triton as write
from trueline.ops.mla_decode import Tiling
from trueline.ops.sampling import cpu as plain_sampling
from trueline.ops.sampling import triton as sampling
from trueline.ops.sparse_rows import Run, SparseRows, Table
from trueline.ops.topk import triton as top
from trueline.utils.json_types import JSON

CALLS, WORKERS = 20, 8
DEVICE, BF16 = "cuda", torch.bfloat16
HEADS, DIM, ROPE, TOPK, VOCABULARY = 64, 128, 64, 2048, 102_400
TILING = Tiling(64, full=False)
# Where one reads what it does not hold, and what it must not forget between calls.
CACHED = 4e8


@dataclass
class SelectionWork:
    ways: Ways
    roofline: float
    """Seconds that the bytes, or the operations, take at least."""
    exact: Callable[[], float]
    """How far the first call is from a formula in torch; what is accepted is 1."""
    flops: float = 0.0


def cells(quick: bool) -> Iterator[Cell]:
    for context in (8192, 32768):
        for n in (1, 16, 64):
            yield Cell("scores", (n, context, "bfloat16", "rows", 64))
    yield Cell("scores", (16, 32768, "bfloat16", "rows", 16))
    for kind in ("rows",) if quick else ("rows", "planar", "shuffled"):
        yield Cell("scores", (16, 32768, "e4m3fn", kind, 64))
    yield Cell("wide", (16, 8192, 163_840))
    for rows, context in ((2048, 8192),) if quick else ((2048, 8192), (2048, 32768)):
        yield Cell("prefill", (rows, context))
    for context in (8192, 32768, 131_072):
        for n in (1, 16, 64):
            yield Cell("top", (n, context))
    yield Cell("top", (1024, 32768))
    for n in (1, 64) if quick else (1, 16, 64, 4096):
        yield Cell("write", (n, "bfloat16"))
        yield Cell("rotate", (n,))
    yield Cell("write", (64, "e4m3fn"))
    for way in ("greedy", "drawn"):
        for n in (1, 16, 64, 256):
            yield Cell(way, (n,))
    yield Cell("logprobs", (64,))


# -- index scores ------------------------------------------------------------------------


def _caches(count: int, context: int, layout: IndexLayout, calls: int) -> tuple[IndexView, Tensor]:
    """Keys of `calls` times `count` sequences, and the blocks [calls, count, most] of each."""
    most = -(-context // layout.block_size)
    store = IndexStore(layout, 1, calls * count * most + 1)
    order = torch.randperm(calls * count * most, device=DEVICE) + 1
    view = IndexView(store.bytes[0], layout, store.views[0].offsets)
    for start in range(0, store.bytes.numel() // layout.token_bytes, 1 << 18):
        stop = min(start + (1 << 18), store.bytes.numel() // layout.token_bytes)
        cells = torch.arange(start, stop, device=DEVICE)
        view.write(cells, torch.randn(len(cells), layout.dim, device=DEVICE))
    return view, order.view(calls, count, most)


def _queries(n: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(n, HEADS, DIM, device=DEVICE, dtype=BF16)
    return q, torch.randn(n, HEADS, device=DEVICE) / HEADS


def _formula(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Of one row."""
    return weights @ (q.float() @ keys.T).relu()


def _cuts(
    usual: scores.ScoresLaunch, count: int, most: int
) -> list[tuple[str, scores.ScoresLaunch]]:
    found = [("usual", usual)]
    for tile, warps, stages, busy in ((64, 4, 3, 2), (64, 4, 5, 3), (128, 8, 3, 2), (64, 4, 7, 2),
                                      (128, 4, 3, 2), (128, 8, 5, 1)):  # fmt: skip
        splits = max(-(-busy * 132 // count), 1)
        name = f"{tile} {warps}w {stages}s /{splits}"
        found.append((name, scores.ScoresLaunch(tile, splits, warps, stages)))
    return found[:most]


def _decode_scores(tables: list[Table], view: IndexView, n: int, context: int) -> SelectionWork:
    q, weights = _queries(n)
    layout, size = view.layout, view.layout.block_size
    prepared = [scores.prepare(table, view, TILING, topk=TOPK) for table in tables]
    usual = scores.launch(n, 1, HEADS, prepared[0].width, BF16, layout.fp8 is not None, 132)
    cuts = _cuts(usual, n, 7 if layout.storage == "bfloat16" and size == 64 else 4)
    ways: Ways = [
        (name, [partial(scores.run, q, weights, view, p, how) for p in prepared])
        for name, how in cuts
    ]

    def exact() -> float:
        ours, worst = scores.run(q, weights, view, prepared[0]), 0.0
        at = torch.arange(context, device=DEVICE)
        for row in {0, n // 2, n - 1}:
            keys = view.read(tables[0].blocks[row][at // size].long() * size + at % size)
            wanted = _formula(q[row], weights[row], keys)
            worst = max(worst, float((ours[row, :context] - wanted).abs().max() / wanted.std()))
        return worst / 1e-4

    return SelectionWork(ways, n * context * layout.token_bytes / READ, exact)


def _scores(n: int, context: int, storage: str, kind: str, size: int) -> SelectionWork:
    layout = IndexLayout(DIM, size, storage, kind)
    calls = min(max(math.ceil(CACHED / (n * context * layout.token_bytes)), 2), CALLS)
    view, blocks = _caches(n, context, layout, calls)
    own = torch.arange(n, device=DEVICE)
    lengths = torch.full((n,), context, device=DEVICE)
    tables = [Table(each, own, lengths) for each in blocks]
    return _decode_scores(tables, view, n, context)


def _wide(n: int, context: int, room: int) -> SelectionWork:
    """What a captured graph sees: a table with room for far more."""
    layout = IndexLayout(DIM, 64, "bfloat16", "rows")
    view, blocks = _caches(n, context, layout, 4)
    own, lengths = torch.arange(n, device=DEVICE), torch.full((n,), context, device=DEVICE)
    more = room // 64 - blocks.shape[2]
    tables = [Table(torch.nn.functional.pad(each, (0, more)), own, lengths) for each in blocks]
    return _decode_scores(tables, view, n, context)


def _prefill(n: int, context: int) -> SelectionWork:
    layout = IndexLayout(DIM, 64, "bfloat16", "rows")
    view, blocks = _caches(1, context, layout, 2)
    q, weights = _queries(n)
    first = context - n + 1
    ways: Ways = []
    cuts = ((4, 64, 4, 3), (4, 128, 8, 3), (2, 128, 4, 3), (2, 128, 8, 3), (8, 64, 8, 2))
    for share, tile, warps, stages in (*cuts, (4, 64, 4, 5)):
        rows = [SparseRows((Run(ids[0].tolist(), first, n),)) for ids in blocks]
        made = [scores.prepare(each, view, TILING, topk=TOPK, share=share) for each in rows]
        how = scores.ScoresLaunch(tile, 1, warps, stages)
        calls: Calls = [partial(scores.run, q, weights, view, p, how) for p in made]
        ways.append((f"{share} rows {tile} {warps}w {stages}s", calls))

    def exact() -> float:
        rows = SparseRows((Run(blocks[0, 0].tolist(), first, n),))
        ours = scores.run(q, weights, view, scores.prepare(rows, view, TILING, topk=TOPK))
        at, worst = torch.arange(context, device=DEVICE), 0.0
        keys = view.read(blocks[0, 0][at // 64] * 64 + at % 64)
        for row in (0, n // 3, n - 1):
            wanted = _formula(q[row], weights[row], keys[: first + row])
            off = (ours[row, : first + row] - wanted).abs().max() / wanted.std()
            worst = max(worst, float(off))
        return worst / 1e-4

    flops = 2.0 * HEADS * DIM * sum(range(first, first + n))
    return SelectionWork(ways, flops / MULTIPLY, exact, flops)


# -- the rest of the indexer ---------------------------------------------------------------


def _top(n: int, width: int) -> SelectionWork:
    given = [torch.randn(n, width, device=DEVICE) for _ in range(2 if n > 64 else 6)]
    lengths = torch.full((n,), width, device=DEVICE)
    usual = top.launch(n, width, TOPK, 132)
    cuts = [("usual", usual)]
    for chunk, part, warps in ((32768, 4096, 32), (32768, 8192, 32), (32768, 4096, 16),
                               (16384, 4096, 32), (16384, 4096, 16), (8192, 4096, 16),
                               (8192, 4096, 8)):  # fmt: skip
        if chunk <= max(width, 8192):
            cuts.append((f"{chunk} {part} {warps}w", top.TopkLaunch(chunk, part, warps)))
    ways: Ways = [
        (name, [partial(top.run, s, lengths, TOPK, how) for s in given]) for name, how in cuts
    ]
    if n <= 64:
        ways.append(("torch.topk", [partial(s.topk, TOPK) for s in given]))

    def exact() -> float:
        wanted = given[0].topk(TOPK).indices.sort().values
        return 0.0 if torch.equal(top.run(given[0], lengths, TOPK), wanted) else math.inf

    return SelectionWork(ways, n * width * 4 / READ, exact)


def _rope(n: int) -> JSON:
    angles = torch.randn(n, ROPE // 2, device=DEVICE) * 100
    return {"cos": angles.cos(), "sin": angles.sin(), "pairing": "half-split", "rope": None}


def _write(n: int, storage: str) -> SelectionWork:
    layout = IndexLayout(DIM, 64, storage, "rows")
    store = IndexStore(layout, 1, 2 + n // 32)
    view = IndexView(store.bytes[0], layout, store.views[0].offsets)
    key = torch.randn(n, DIM, device=DEVICE, dtype=BF16)
    cells = torch.randperm(64 * (2 + n // 32), device=DEVICE)[:n]
    one, none = torch.ones(DIM, device=DEVICE), torch.zeros(DIM, device=DEVICE)
    options = {"norm": one, "bias": none, "eps": 1e-6, **_rope(n)}
    calls: Calls = [lambda: write.run(key, view, cells, **options)] * CALLS

    def exact() -> float:
        write.run(key, view, cells, **options)
        x = torch.nn.functional.layer_norm(key.float(), (DIM,)).to(BF16).float()
        wanted = _rotated(x[:, None], options)[:, 0]
        error = (view.read(cells) - wanted).norm() / wanted.norm()
        return float(error) / (0.04 if layout.fp8 else 6e-3)

    return SelectionWork([("usual", calls)], n * (2 * DIM + layout.token_bytes) / READ, exact)


def _rotated(x: Tensor, options: JSON) -> Tensor:
    c, s = options["cos"][:, None], options["sin"][:, None]
    a, b = x[..., : ROPE // 2], x[..., ROPE // 2 : ROPE]
    return torch.cat((a * c - b * s, b * c + a * s, x[..., ROPE:]), -1)


def _rotate(n: int) -> SelectionWork:
    q = torch.randn(n, HEADS, DIM, device=DEVICE, dtype=BF16)
    options = _rope(n)
    calls: Calls = [lambda: write.rotate(q, **options)] * CALLS

    def exact() -> float:
        wanted = _rotated(q.float(), options)
        return float((write.rotate(q, **options).float() - wanted).norm() / wanted.norm()) / 4e-3

    return SelectionWork([("usual", calls)], n * HEADS * DIM * 4 / READ, exact)


# -- sampling --------------------------------------------------------------------------------


def _logits(n: int) -> list[Tensor]:
    return [3 * torch.randn(n, VOCABULARY, device=DEVICE) for _ in range(4)]


def _ways(
    n: int, run: Callable[[Tensor, sampling.SamplingLaunch], object], given: list[Tensor]
) -> Ways:
    usual = sampling.launch(n, VOCABULARY, 132)
    cuts = [("usual", usual)]
    for chunk, warps in ((1024, 4), (2048, 4), (4096, 4), (2048, 8), (4096, 8)):
        cuts.append((f"{chunk} {warps}w", replace(usual, chunk=chunk, warps=warps)))
    return [(name, [partial(run, x, how) for x in given]) for name, how in cuts]


def _greedy(n: int) -> SelectionWork:
    given = _logits(n)
    ways = _ways(n, lambda x, how: sampling.draw(x, how=how), given)
    ways.append(("torch.argmax", [partial(x.argmax, -1) for x in given]))

    def exact() -> float:
        tokens, bad = sampling.draw(given[0])
        good = torch.equal(tokens, given[0].argmax(-1)) and not bool(bad.any())
        return 0.0 if good else math.inf

    return SelectionWork(ways, n * VOCABULARY * 4 / READ, exact)


def _drawn(n: int) -> SelectionWork:
    given = _logits(n)
    warm = torch.full((n,), 0.8, device=DEVICE, dtype=torch.float64)
    seed = torch.arange(n, device=DEVICE) * 12345
    counters = (warm, seed, torch.full_like(seed, 77))
    ways = _ways(n, lambda x, how: sampling.draw(x, *counters, how=how), given)

    def exact() -> float:
        keys = plain_sampling._keys(*counters[1:])
        x = (given[0].double() - given[0].double().amax(-1, keepdim=True)) / warm[:, None]
        every = torch.arange(VOCABULARY, device=DEVICE)
        wanted = (plain_sampling.noise(keys, every) + x).argmax(-1)
        return 0.0 if torch.equal(sampling.draw(given[0], *counters)[0], wanted) else math.inf

    return SelectionWork(ways, n * VOCABULARY * 4 / READ, exact)


def _logprobs(n: int) -> SelectionWork:
    given, tokens = _logits(n), torch.arange(n, device=DEVICE) * 7
    calls: Calls = [partial(sampling.score, x, tokens, 0) for x in given]

    def exact() -> float:
        wanted = given[0].double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        found = sampling.score(given[0], tokens, 0).logprobs
        return float((found - wanted).abs().max()) / 1e-6

    return SelectionWork([("usual", calls)], n * VOCABULARY * 4 / READ, exact)


# -- running ---------------------------------------------------------------------------------


MAKERS: dict[str, Callable[..., SelectionWork]] = {
    "scores": _scores,
    "wide": _wide,
    "prefill": _prefill,
    "top": _top,
    "write": _write,
    "rotate": _rotate,
    "greedy": _greedy,
    "drawn": _drawn,
    "logprobs": _logprobs,
}


def work(cell: Cell) -> SelectionWork:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return MAKERS[cell.kind](*cell.key)


def compile_all(todo: list[Cell]) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    failed = []
    for cell in todo:
        try:
            for _, calls in work(cell).ways:
                calls[0]()
        except Exception as error:
            failed.append(f"FAIL {cell}: {last_line(error)}")
    torch.cuda.synchronize()
    return failed


def measure(cell: Cell) -> JSON:
    made = work(cell)
    times: dict[str, float] = {}
    for label, calls in made.ways:
        try:
            times[label] = graph_time(calls)
        except Exception as error:
            print(f"FAIL {cell} {label}: {str(error).splitlines()[0]}")
    ours = {label: us for label, us in times.items() if not label.startswith("torch")}
    best = min(ours, key=lambda label: ours[label])
    roofline = made.roofline * 1e6
    line = f"{cell!s:<40} {best:<18} {times[best]:8.1f} µs  roofline {roofline:7.2f}"
    line += f" ({roofline / times[best]:4.0%}) {roofline / times[best] * READ / 1e9:5.0f} GB/s"
    if made.flops:
        line += f" {made.flops / times[best] / 1e6:5.0f} TFLOP/s"
    print(line, " ".join(f"[{label} {us:.1f}]" for label, us in times.items()), flush=True)
    if not (off := made.exact()) <= 1:
        print(f"FAIL {cell}: off by {off:.2g} times what is accepted")
    return {"cell": str(cell), "roofline_us": roofline, "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    todo = list(cells(options.quick))
    torch.backends.cuda.matmul.allow_tf32 = False
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        compiled = [pool.submit(compile_all, todo[i::WORKERS]) for i in range(WORKERS)]
        for future in compiled:
            for failure in future.result():
                print(failure, flush=True)
    rows = []
    for cell in todo:
        try:
            rows.append(measure(cell))
        except Exception:
            print(f"FAIL {cell}", *traceback.format_exc().splitlines()[-5:], sep="\n     ")
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
