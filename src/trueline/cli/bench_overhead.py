"""`trueline bench overhead`: what the server costs, beside the same engine without it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.bench_serve import check_writable
from trueline.cli.output import tables
from trueline.errors import UsageError
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.bench.overhead.rounds import Pair
    from trueline.client.load import Shape


def overhead(
    model: str,
    /,
    *,
    streams: tuple[int, ...] = (1, 8, 32),
    prompt_len: int = 128,
    output_len: int = 64,
    repeats: int = 3,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    out: Path | None = None,
    plot: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Tokens per second through `trueline serve`, beside the same engine without it.

    Engine, server and client share this machine. The same prompts go to both, in turn; a ratio
    is of two runs right after each other.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    streams
        Requests at once. May be given several times.
    repeats
        Rounds to take the medians of, in which no other process used the machine; three times as
        many are tried.
    dtype
        Of weights and cache; auto is the config's.
    out
        Write the figures of every round to this JSON file.
    plot
        Draw both into this file (.svg or .png).
    as_json
        Print the figures as JSON.
    """
    from trueline.bench.models import find_bench_model
    from trueline.bench.overhead.rounds import summarise
    from trueline.client.load import Shape
    from trueline.models import read_model

    if repeats < 1 or min(streams) < 1:
        raise UsageError("--repeats and --streams take numbers from 1 up")
    check_writable(out, plot)
    directory, has_weights = find_bench_model(model)
    shape = Shape(prompt_len, output_len, read_model(directory).vocab.total, seed=0)
    options = {"dtype": dtype, "max_num_seqs": max(streams)}
    pairs = _measure(directory, has_weights, options, shape, streams, repeats)
    rows = summarise(pairs)
    figures = {
        "model": model, "prompt_len": prompt_len, "output_len": output_len, "dtype": dtype,
        "rows": rows, "rounds": [_as_json(pair) for pair in pairs],
    }  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    _plot(plot, rows, f"{directory.name}: {prompt_len} + {output_len} tokens")
    print(json.dumps(figures, indent=1)) if as_json else _print(rows)


def _measure(
    directory: Path,
    has_weights: bool,
    options: JSON,
    shape: Shape,
    streams: tuple[int, ...],
    repeats: int,
) -> list[Pair]:
    from trueline.bench.overhead.processes import both
    from trueline.bench.overhead.rounds import Overhead
    from trueline.client.measure import run_loop
    from trueline.tiny.tokenizer import write_word_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        # random tokens of a model's own may spell nothing, and then there is nothing to stream
        write_word_tokenizer(Path(scratch), shape.vocab_size)
        _say(f"loading {directory} twice")
        with both(directory, options, has_weights, Path(scratch)) as (offline, served):
            bench = Overhead(offline, served, shape)
            return run_loop(bench.rounds(streams, repeats, _report))


def _plot(file: Path | None, rows: list[JSON], title: str) -> None:
    if file is None:
        return
    from trueline.bench.overhead.plot import plot_rows

    plot_rows(file, rows, title)


def _as_json(pair: Pair) -> JSON:
    from dataclasses import asdict

    return asdict(pair) | {"ratio": pair.ratio, "decode_ratio": pair.decode_ratio}


def _report(pair: Pair) -> None:
    rates = (pair.rate(pair.offline), pair.rate(pair.server))
    noise = "" if pair.is_quiet else " (others used the machine)"
    _say(f"{pair.streams} at once: {rates[0]:.1f} tokens/s offline, {rates[1]:.1f} through the "
         f"server, ratio {pair.ratio:.3f}{noise}")  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(rows: list[JSON]) -> None:
    from rich import box
    from rich.table import Table

    heads = ("streams", "offline tokens/s", "server tokens/s", "ratio", "lowest", "highest",
             "decode ratio", "first s offline", "server", "quiet")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for row in rows:
        rates = (f"{row[f'{side}_tokens_per_s']:.1f}" for side in ("offline", "server"))
        ratios = (f"{row[key]:.3f}" for key in ("ratio", "ratio_low", "ratio_high", "decode_ratio"))
        firsts = (f"{row[f'{side}_first_token_s']:.3f}" for side in ("offline", "server"))
        quiet = f"{row['quiet_rounds']} of {row['rounds']}"
        table.add_row(str(row["streams"]), *rates, *ratios, *firsts, quiet)
    console = tables()
    console.print(table)
    for row in rows:
        costs = ", ".join(f"{name} {us:,.0f}" for name, us in row["us_per_token"].items())
        console.print(f"{row['streams']} at once, µs of a core for a token: {costs}")
