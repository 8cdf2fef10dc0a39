"""Linear attention, norms, rotation and cache writes on one GPU: times.

    python -m trueline.bench.gpu.kernels.lightning [--quick] [--out FILE.json]

What is timed is compiled in several processes at once first. tests/gpu/test_gpu.py has the checks.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.gpu.kernels.timing import ENGINE, Calls, Ways, asked, graph_time, recorded
from trueline.bench.gpu.roofline import READ
from trueline.cache.layout import LatentLayout
from trueline.cache.state import StateStore, StateView
from trueline.cache.store import LatentStore
from trueline.ops.gated_norm import triton as gated_norm
from trueline.ops.latent_write import Parts
from trueline.ops.latent_write import triton as latent_write
from trueline.ops.lightning import StateRow, StateTable
from trueline.ops.lightning import triton as lightning
from trueline.ops.lightning.triton import DecodeLaunch, PrefillLaunch
from trueline.ops.qkv_prepare import triton as qkv_prepare
from trueline.ops.rms_norm import triton as rms_norm
from trueline.ops.rope import triton as rope
from trueline.utils.json_types import JSON

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
D, SCALE, SMS = 128, 0.09, 132
GATE, STATE_GATE = 3.2e-3, 1e-5
"""Relative to the sum of a row's magnitudes: inputs have 8 bits, states are float32."""
WORKERS = 8
# What the calls of one graph touch together, several times what the cache holds.
TOUCHED = 4e8

DECODE = [DecodeLaunch(*each) for each in (
    (16, 4), (32, 4), (8, 2), (8, 4), (16, 2), (32, 2), (32, 8), (64, 4), (64, 8), (128, 8),
)]  # fmt: skip
PREFILL = [
    PrefillLaunch(*each, programs * SMS)
    for programs, each in (
        (2, (64, 64, 4, 2)),
        (2, (64, 64, 4, 1)),
        (2, (64, 64, 4, 3)),
        (1, (64, 64, 4, 2)),
        (4, (64, 64, 4, 2)),
        (2, (64, 64, 8, 2)),
        (1, (64, 128, 8, 1)),
        (1, (64, 128, 8, 2)),
        (1, (64, 128, 8, 3)),
        (2, (64, 32, 4, 2)),
        (2, (64, 32, 4, 3)),
        (1, (64, 32, 4, 2)),
        (1, (64, 32, 4, 3)),
        (1, (64, 16, 4, 2)),
        (1, (64, 16, 4, 3)),
        (1, (64, 16, 2, 2)),
        (4, (64, 64, 4, 3)),
        (4, (64, 128, 8, 2)),
        (2, (128, 64, 8, 2)),
        (1, (128, 32, 8, 2)),
        (1, (128, 16, 4, 2)),
        (1, (32, 16, 4, 3)),
    )
]


@dataclass
class LightningWork:
    """A cell: ways to do it, and the least that it must move."""

    name: str
    ways: Ways
    bytes: float
    flops: float = 0.0
    peer: tuple[str, int, int, int] | None = None
    """kind, H, B and T."""


# -- data --------------------------------------------------------------------------------


QKV = tuple[Tensor, Tensor, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


def slots(count: int, heads: int) -> StateView:
    with DEVICE:
        store = StateStore(
            num_layers=1, num_slots=count, heads=heads, dk=D, dv=D, dtype=torch.float32, tail=0
        )
    view = store.views[0]
    view.state.normal_()
    return view


def slopes(heads: int) -> Tensor:
    return torch.logspace(-5, 0, heads, device=DEVICE)


def qkv(tokens: int, heads: int) -> QKV:
    """Columns of one GEMM that computes the gate too."""
    whole = draw(tokens, 4, heads, D)
    return whole[:, 0], whole[:, 1], whole[:, 2]


def num_calls(each: float) -> int:
    """Calls of a graph, given the bytes of one."""
    return int(min(max(TOUCHED / each, 2), 200))


# -- cells -------------------------------------------------------------------------------


def decode(rows: int, heads: int = 16) -> LightningWork:
    each = 2.0 * rows * heads * D * D * 4
    count = num_calls(each / 2)
    view, rates = slots(1 + count * rows, heads), slopes(heads)
    inputs = [qkv(rows, heads) for _ in range(count)]
    tables = []
    for number in range(count):
        own = range(1 + number * rows, 1 + (number + 1) * rows)
        tables.append(StateTable.of([StateRow(5, slot, slot) for slot in own], DEVICE))

    def call(q: Tensor, k: Tensor, v: Tensor, table: StateTable, launch: DecodeLaunch) -> Tensor:
        rows = lightning.prepare(table)
        return lightning.decode(q, k, v, view, rows, slopes=rates, scale=SCALE, launch=launch)

    def calls(launch: DecodeLaunch) -> Calls:
        return [partial(call, *x, t, launch) for x, t in zip(inputs, tables, strict=True)]

    usual = lightning.decode_launch(rows, heads, D, SMS)
    launches = sorted(DECODE, key=lambda launch: launch != usual)  # the engine's first
    ways = [(label(launch, usual), calls(launch)) for launch in launches]
    return LightningWork(f"decode B {rows}", ways, each, 0, ("decode", heads, rows, 1))


def prefill(heads: int, rows: int, tokens: int, launches: list[PrefillLaunch]) -> LightningWork:
    each = 8.0 * rows * tokens * heads * D
    view, rates = slots(1 + rows, heads), slopes(heads)
    inputs = [qkv(rows * tokens, heads) for _ in range(num_calls(each))]
    parts = [(slice(i * tokens, (i + 1) * tokens), StateRow(0, None, 1 + i)) for i in range(rows)]
    prepared = lightning.prepare_prefill(parts)

    def call(q: Tensor, k: Tensor, v: Tensor, launch: PrefillLaunch) -> Tensor:
        return lightning.prefill(q, k, v, view, prepared, slopes=rates, scale=SCALE, launch=launch)

    def calls(launch: PrefillLaunch) -> Calls:
        return [partial(call, *x, launch) for x in inputs]

    usual = lightning.prefill_launch(DTYPE, (heads, D, D), [tokens] * rows, SMS, True)
    launches = [usual, *(launch for launch in launches if launch != usual)]  # the engine's first
    ways = [(label(launch, usual), calls(launch)) for launch in launches]
    # scores and outputs within a chunk of 64, from the state, and the state
    flops = 2.0 * rows * tokens * heads * D * (64 + 64 + D + D)
    name = f"prefill H {heads} B {rows} T {tokens}"
    return LightningWork(name, ways, each, flops, ("prefill", heads, rows, tokens))


def label(launch: DecodeLaunch | PrefillLaunch, usual: DecodeLaunch | PrefillLaunch) -> str:
    name = "x".join(map(str, astuple(launch)))
    return f"{name} (usual)" if launch == usual else name


def norms(n: int, width: int) -> Iterator[LightningWork]:
    weight = draw(width)
    count = num_calls(4.0 * n * width)
    h = [draw(n, width) for _ in range(count)]
    pairs = list(zip(h, h[::-1], strict=True))
    plain: Calls = [partial(rms_norm.run, x, weight, 1e-6) for x in h]
    both: Calls = [partial(rms_norm.run_sum, x, y, weight, 1e-6) for x, y in pairs]
    yield LightningWork(f"rms_norm {n} x {width}", [("", plain)], 4.0 * n * width)
    yield LightningWork(f"rms_norm of a sum {n} x {width}", [("", both)], 8.0 * n * width)


def layer_parts(n: int, heads: int = 16) -> Iterator[LightningWork]:
    """What stands around attention, with the widths of v2lite and ling25s."""
    angles = torch.randn(n, 32, device=DEVICE)
    cos, sin, parts = angles.cos(), angles.sin(), Parts(rms_norm, rope)
    with DEVICE:
        view = LatentStore(LatentLayout(512, 64, 64), 1, 2 + n // 64, DTYPE).views[0]
    cells, latent, norm = torch.arange(n, device=DEVICE), draw(n, 512 + 64), draw(512)
    queries, whole, weight = draw(n, heads, D + 64), draw(n, 4 * heads * D), draw(heads * D)
    yield LightningWork(f"latent_write {n}", [("", [lambda: latent_write.run(
        latent[:, :512], latent[:, 512:], queries[..., D:], view, cells,
        norm=norm, eps=1e-6, cos=cos, sin=sin, pairing="interleaved", parts=parts,
    )] * 20)], 2.0 * n * 64 * (18 + 2 * heads))  # fmt: skip
    yield LightningWork(f"rope {n}", [("", [lambda: rope.run(
        queries[..., D:], cos, sin, "interleaved")] * 20)], 4.0 * n * heads * 64)  # fmt: skip
    yield LightningWork(f"qkv_prepare {n}", [("", [lambda: qkv_prepare.run(
        whole[:, : 3 * heads * D], heads=heads, silu=False, norms=(norm[:D], norm[D : 2 * D]),
        eps=1e-6, rope=(cos, sin, "half-split"), parts=parts,
    )] * 20)], 8.0 * n * heads * D)  # fmt: skip
    yield LightningWork(f"gated_norm {n}", [("", [lambda: gated_norm.run(
        whole[:, : heads * D], whole[:, 3 * heads * D :],
        weight=weight, groups=4, eps=1e-6, parts=parts,
    )] * 20)], 6.0 * n * heads * D)  # fmt: skip


def cells(quick: bool) -> Iterator[Callable[[], Iterator[LightningWork]]]:
    for rows in (1, 16, 64, 256):
        yield partial(_one, partial(decode, rows))
    launches = PREFILL[:5] if quick else PREFILL
    for shape in ((16, 1, 1024), (16, 1, 8192), (16, 8, 4096), (64, 1, 1024)):
        yield partial(_one, partial(prefill, *shape, launches))
    for n in (1, 16, 256):
        yield partial(layer_parts, n)
        for width in (2048, 7168):
            yield partial(norms, n, width)


def _one(make: Callable[[], LightningWork]) -> Iterator[LightningWork]:
    yield make()


# -- exact numbers -------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor, start: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, d] and the state after them, all tokens at once, in float64."""
    n = len(q)
    at = torch.arange(n, device=q.device)
    lag = at[:, None] - at
    outs, states = [], []
    for head, rate in enumerate(rates.double()):
        a, b, c, s = (x.double() for x in (q[:, head], k[:, head], v[:, head], start[head]))
        weights = torch.exp(-rate * lag.clamp_min(0)).masked_fill(lag < 0, 0)
        outs.append((a @ b.T * weights) @ c + torch.exp(-rate * (at + 1))[:, None] * (a @ s))
        states.append(
            (b * torch.exp(-rate * (n - 1 - at))[:, None]).T @ c + torch.exp(-rate * n) * s
        )
    return SCALE * torch.stack(outs, 1), torch.stack(states)


def compare(what: str, ours: Tensor, wanted: Tensor, size: Tensor, gate: float) -> str:
    error = (ours.double() - wanted).norm(dim=-1) / size.norm(dim=-1).clamp_min(1e-30)
    worst = float(error.max())
    return f"{'PASS' if worst <= gate else 'FAIL'} {what}: {worst:.2g}, accepted {gate:g}"


def real_shapes() -> Iterator[str]:
    """One walk and several, legs that end at snapshots, decode; every row of outputs and states."""
    for heads, counts in ((16, (1024,)), (64, (1024,)), (16, (700, 90, 1))):
        rates, view = slopes(heads), slots(8, heads)
        starts = [0, 3, 9]
        held = [torch.zeros_like(view.state[0]), view.state[2].clone(), view.state[3].clone()]
        x, parts, first = qkv(sum(counts), heads), [], 0
        for i, count in enumerate(counts):
            snapshots = ((starts[i] + count // 2, 5),) if i == 0 else ()
            row = StateRow(starts[i], 1 + i if i else None, 1 + i, snapshots)
            parts.append((slice(first, first + count), row))
            first += count
        prepared = lightning.prepare_prefill(parts)
        out = lightning.prefill(*x, view, prepared, slopes=rates, scale=SCALE)
        for (at, row), start in zip(parts, held, strict=False):
            part = _some(x, at)
            yield from _compared(f"prefill {heads} heads, {row}", part, start, rates, out[at],
                                 view.state[row.slot])  # fmt: skip
            for place, slot in row.snapshots:
                short = _some(part, slice(place - row.start))
                yield from _compared(f"snapshot at {place}", short, start, rates, None,
                                     view.state[slot])  # fmt: skip
    view, rates, x = slots(40, 16), slopes(16), qkv(16, 16)
    before = view.state.clone()
    rows = [StateRow(7, 2 * i + 1, 2 * i + 2) for i in range(16)]
    table = lightning.prepare(StateTable.of(rows, DEVICE))
    out = lightning.decode(*x, view, table, slopes=rates, scale=SCALE)
    for i in (0, 15):
        part = _some(x, slice(i, i + 1))
        yield from _compared(f"decode row {i}", part, before[2 * i + 1], rates, out[i : i + 1],
                             view.state[2 * i + 2])  # fmt: skip


def _some(x: QKV, tokens: slice) -> QKV:
    q, k, v = x
    return q[tokens], k[tokens], v[tokens]


def _compared(
    what: str, x: QKV, start: Tensor, rates: Tensor, out: Tensor | None, state: Tensor
) -> Iterator[str]:
    q, k, v = x
    wanted, after = exact(q, k, v, start, rates)
    size, _ = exact(q.abs(), k.abs(), v.abs(), start.abs(), rates)
    if out is not None:
        yield compare(f"{what}: outputs", out, wanted, size, GATE)
    flat = after.flatten(1)
    yield compare(f"{what}: state", state.flatten(1), flat, flat, STATE_GATE)


# -- running -------------------------------------------------------------------------------


def compile_some(part: int, quick: bool) -> list[str]:
    """In a process of its own: what it compiles is in Triton's cache for the others."""
    failed = []
    view, rates, x = slots(2, 16), slopes(16), qkv(64 * 16, 16)
    table = lightning.prepare(StateTable.of([StateRow(1, 1, 1)], DEVICE))
    for how in DECODE[part::WORKERS]:
        try:
            q, k, v = _some(x, slice(1))
            lightning.decode(q, k, v, view, table, slopes=rates, scale=SCALE, launch=how)
        except Exception as error:
            failed.append(f"FAIL decode {how}: {str(error).splitlines()[:1]}")
    for launch in (PREFILL[:5] if quick else PREFILL)[part::WORKERS]:
        try:
            for tokens in (64, 64 * 16):  # one walk, and several
                q, k, v = _some(x, slice(tokens))
                prepared = lightning.prepare_prefill([(slice(0, tokens), StateRow(0, None, 1))])
                lightning.prefill(q, k, v, view, prepared, slopes=rates, scale=SCALE, launch=launch)
        except Exception as error:
            failed.append(f"FAIL prefill {launch}: {str(error).splitlines()[:1]}")
    torch.cuda.synchronize()
    return failed


def peers(peer: tuple[str, int, int, int]) -> dict[str, float]:
    kind, heads, rows, tokens = peer
    return recorded("linear", kind=kind, H=heads, B=rows, T=tokens)


def measure(work: LightningWork) -> JSON:
    times: dict[str, float] = {}
    for name, calls in asked(work.ways):
        try:
            times[name] = graph_time(calls)
        except Exception as error:
            print(f"FAIL {work.name} {name}: {str(error).splitlines()[:1]}", flush=True)
    if not times:
        return {"cell": work.name}
    best = min(times, key=lambda name: times[name])
    us = times[best]
    line = f"{work.name:<28} {best:<26} {us:7.1f} µs {work.bytes / us / 1e3:6.0f} GB/s"
    line += f" (roofline {work.bytes / READ * 1e6:.1f})"
    if work.flops:
        line += f" {work.flops / us / 1e6:4.0f} TFLOP/s"
    theirs = peers(work.peer) if work.peer else {}
    if theirs:
        first = min(theirs, key=lambda name: theirs[name])
        vllm = next(us for name, us in theirs.items() if name.startswith("vLLM"))
        line += f"  best peer {theirs[first]:.1f} ({first}, ratio {us / theirs[first]:.2f})"
        line += f", vLLM {vllm:.1f} ({us / vllm:.2f})"
    print(line, flush=True)
    if len(times) > 1:
        print("    ", " ".join(f"[{name} {each:.1f}]" for name, each in times.items()), flush=True)
    return {"cell": work.name, "us": times, "peers": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer ways of prefill")
    parser.add_argument("--engine", action="store_true", help="only what the engine takes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(24, get_context("spawn")) as pool:
        parts = () if ENGINE else range(WORKERS)
        jobs = [pool.submit(compile_some, part, options.quick) for part in parts]
        for job in jobs:
            for failure in job.result():
                print(failure, flush=True)
    for line in real_shapes():
        print(line, flush=True)
    results = []
    for cell in cells(options.quick):
        try:
            results += [measure(work) for work in cell()]
        except Exception:
            print("FAIL", traceback.format_exc().splitlines()[-1], flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
