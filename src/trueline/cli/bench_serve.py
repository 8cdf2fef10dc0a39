"""`trueline bench serve`: what a server does under load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.cli.remote import ConnectionOptions
from trueline.errors import UsageError
from trueline.utils.progress import progress_bar

if TYPE_CHECKING:
    from trueline.client.load import Load, Shape
    from trueline.client.measure import Bench

TIMES = {
    "ttft_ms": "first token",
    "itl_ms": "between tokens",
    "tpot_ms": "mean per token",
    "e2e_ms": "whole answer",
}


def serve(
    url: str,
    /,
    *,
    concurrency: tuple[int, ...] = (),
    rate: tuple[float, ...] = (),
    prompt_len: int = 128,
    output_len: int = 64,
    num_requests: int | None = None,
    duration: float | None = None,
    vocab_size: int = 256,
    seed: int = 0,
    ignore_eos: Annotated[bool, Parameter(negative="--no-ignore-eos")] = True,
    warmup: int = 1,
    connection: ConnectionOptions = ConnectionOptions(),  # noqa: B008
    out: Path | None = None,
    plot: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Latency and throughput of any server that speaks OpenAI's protocol, under load.

    Requests are random token ids, the same for every server. Fails (1) where a request failed.

    Parameters
    ----------
    url
        As http://127.0.0.1:8000, with or without /v1.
    concurrency
        Keep this many requests under way (8 where no load is given). May be given several times.
    rate
        Start this many requests a second, at random times (Poisson), however many are under way.
        May be given several times.
    num_requests
        At each load. Default: four times --concurrency and at least 16; 64 at a --rate.
    duration
        Start requests for this many seconds at each load.
    vocab_size
        Prompt tokens are drawn below this.
    seed
        Of prompts and arrival times; another one finds no prompt in the server's cache.
    ignore_eos
        Every answer has --output-len tokens. Without it, for servers that do not know the field.
    warmup
        Requests before the first load that are not counted.
    out
        Write the figures to this JSON file; after every load, so that an interrupt keeps some.
    plot
        Draw latency and throughput against load into this file (.svg or .png).
    as_json
        Print the figures as JSON.
    """
    from trueline.client.load import Shape

    shape = Shape(prompt_len, output_len, vocab_size, seed, ignore_eos)
    loads = _loads(concurrency, rate, num_requests, duration)
    check_writable(out, plot)
    figures = _measure(connection, url, shape, loads, warmup, out)
    print(json.dumps(figures, indent=1)) if as_json else _print(figures["points"])
    _plot(plot, figures)
    return int(any(point["errors"] for point in figures["points"]))


def _loads(
    concurrency: tuple[int, ...],
    rate: tuple[float, ...],
    num_requests: int | None,
    duration: float | None,
) -> list[Load]:
    from trueline.client.load import Load

    closed = concurrency or (() if rate else (8,))
    loads = [Load(each, None, num_requests, duration) for each in dict.fromkeys(closed)]
    return loads + [Load(None, each, num_requests, duration) for each in dict.fromkeys(rate)]


def _measure(
    connection: ConnectionOptions,
    url: str,
    shape: Shape,
    loads: list[Load],
    warmup: int,
    out: Path | None,
) -> dict[str, Any]:
    from trueline.client.measure import Bench, run_loop

    if warmup < 1:
        raise UsageError(f"--warmup {warmup}: accepted: numbers from 1 up")
    server = connection.open(url)
    bench = Bench(server, server.pick_model(connection.model), shape)
    figures: dict[str, Any] = {
        "url": server.base, "model": bench.model, "prompt_len": shape.prompt_len,
        "output_len": shape.output_len, "vocab_size": shape.vocab_size, "seed": shape.seed,
        "points": [],
    }  # fmt: skip
    run_loop(_sweep(bench, loads, warmup, figures, out))
    return figures


def _plot(file: Path | None, figures: dict[str, Any]) -> None:
    if file is None:
        return
    from trueline.client.plot import plot_points

    lengths = f"{figures['prompt_len']} + {figures['output_len']} tokens a request"
    plot_points(file, figures["points"], f"{figures['model']}: {lengths}", figures["output_len"])


async def _sweep(
    bench: Bench, loads: list[Load], warmup: int, figures: dict[str, Any], out: Path | None
) -> None:
    from trueline.client.figures import doubts, summary

    try:
        print(f"warming up {bench.server.base}", file=sys.stderr, flush=True)
        await bench.warm_up(warmup)
        for load in loads:
            unit = "requests" if load.limit or load.rate else "seconds"
            with progress_bar(f"{load.name}, {unit}", in_bytes=False) as report:
                run = await bench.run(load, report)
            point = summary(run, bench.shape)
            point["doubts"] = doubts(point)
            figures["points"].append(point)
            if out is not None:
                out.write_text(json.dumps(figures, indent=1))
    finally:
        bench.close()


def check_writable(*files: Path | None) -> None:
    """Before minutes of work, not after."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{file}: no such directory")


def _print(points: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    console = tables()
    table = Table("load", "requests", "failed", "req/s", "output tokens/s", "total tokens/s",
                  "in flight", box=box.SIMPLE_HEAD)  # fmt: skip
    for point in points:
        rates = (point["output_tokens_per_s"], point["total_tokens_per_s"])
        table.add_row(
            point["load"]["name"], str(point["requests"]),
            str(point["requests"] - point["succeeded"]), f"{point['requests_per_s']:.2f}",
            *(f"{value:,.1f}" for value in rates), f"{point['mean_in_flight']:.1f}",
        )  # fmt: skip
    console.print(table)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    table = Table("ms", "load", *columns, box=box.SIMPLE_HEAD)
    for key, name in TIMES.items():
        for number, point in enumerate(points):
            spread = point[key]
            cells = (f"{spread[column]:,.2f}" if spread else "–" for column in columns)
            table.add_row("" if number else name, point["load"]["name"], *cells)
        table.add_section()
    console.print(table)
    _print_notes(points)


def _print_notes(points: list[dict[str, Any]]) -> None:
    for point in points:
        name = point["load"]["name"]
        for kind, error in point["errors"].items():
            print(f"{name}: {error['count']} × {kind}: {error['example']}", file=sys.stderr)
        for doubt in point["doubts"]:
            print(f"{name}: {doubt}", file=sys.stderr)
