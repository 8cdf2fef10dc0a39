"""`trueline bench`: how fast it is here, and beside whom."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from trueline.cli.bench_cache_noise import cache_noise
from trueline.cli.bench_canaries import canaries
from trueline.cli.bench_context import context
from trueline.cli.bench_formats import formats
from trueline.cli.bench_gpu import gpu
from trueline.cli.bench_grammars import grammars
from trueline.cli.bench_memory import memory
from trueline.cli.bench_neighbours import neighbours
from trueline.cli.bench_overhead import overhead
from trueline.cli.bench_processes import processes
from trueline.cli.bench_ranks import ranks
from trueline.cli.bench_serve import serve
from trueline.cli.output import tables
from trueline.errors import UsageError
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.bench.workload import Figures

Json = Annotated[bool, Parameter(name="--json", negative=())]
Dtype = Literal["float32", "bfloat16"]

bench = App(name="bench", help="Measure speed: throughput, latency, or side by side with a peer.")
bench.command(cache_noise, name="cache-noise")
bench.command(canaries, name="canaries")
bench.command(context, name="context")
bench.command(formats, name="formats")
bench.command(gpu, name="gpu")
bench.command(grammars, name="grammars")
bench.command(memory, name="memory")
bench.command(neighbours, name="neighbours")
bench.command(processes, name="processes")
bench.command(ranks, name="ranks")
bench.command(serve, name="serve")
bench.command(overhead, name="overhead")


@bench.command
def throughput(
    model: str,
    /,
    *,
    batch: int = 32,
    prompt_len: int = 128,
    output_len: int = 64,
    kv_cache_dtype: str = "auto",
    numerics: Literal["auto", "weights", "activations", "published"] = "auto",
    batch_invariant: Annotated[bool, Parameter(negative=())] = False,
    repeats: int = 1,
    as_json: Json = False,
) -> None:
    """Tokens per second of many requests at once.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    batch
        Requests at once.
    kv_cache_dtype
        Of latents: auto (as computed), e4m3fn (also fp8, fp8_e4m3), e4m3fnuz.
    numerics
        Of block fp8: weights (activations as computed), activations (in fp8 too). auto:
        activations on a GPU of compute capability 9.0. Of DeepSeek-V4: published (weights, and rows
        rounded as the authors' inference code does).
    repeats
        Take the best of this many runs.
    """
    from trueline.bench.workload import Workload, bench_engine, measure

    engine = bench_engine(
        model,
        kv_cache_dtype=kv_cache_dtype,
        numerics=numerics,
        batch_invariant=batch_invariant,
        max_num_seqs=max(batch, 1),
    )
    figures = measure(engine, Workload(batch, prompt_len, output_len), repeats)
    _print([("trueline", figures)], as_json)


@bench.command
def latency(
    model: str,
    /,
    *,
    prompt_len: int = 128,
    output_len: int = 64,
    kv_cache_dtype: str = "auto",
    numerics: Literal["auto", "weights", "activations", "published"] = "auto",
    batch_invariant: Annotated[bool, Parameter(negative=())] = False,
    repeats: int = 3,
    as_json: Json = False,
) -> None:
    """Time to first token and tokens per second of one request alone.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    kv_cache_dtype
        Of latents: auto (as computed), e4m3fn (also fp8, fp8_e4m3), e4m3fnuz.
    numerics
        Of block fp8: weights (activations as computed), activations (in fp8 too). auto:
        activations on a GPU of compute capability 9.0. Of DeepSeek-V4: published (weights, and rows
        rounded as the authors' inference code does).
    repeats
        Take the best of this many runs.
    """
    from trueline.bench.workload import Workload, bench_engine, measure

    engine = bench_engine(
        model, kv_cache_dtype=kv_cache_dtype, numerics=numerics, batch_invariant=batch_invariant
    )
    _print([("trueline", measure(engine, Workload(1, prompt_len, output_len), repeats))], as_json)


@bench.command
def compare(
    config: str,
    /,
    *,
    peer: Literal["transformers"] = "transformers",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """The standard CPU workloads, ours and a peer's on the same random checkpoint, one after the
    other in processes of their own; and what batch invariance costs.

    Parameters
    ----------
    config
        A config.json, or the name of one of ours: mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s.
    peer
        Must be installed.
    """
    from trueline.bench.models import find_bench_model
    from trueline.bench.workload import STANDARD

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        _say(f"making a random {dtype} checkpoint of {config}")
        directory, _ = find_bench_model(config)
        _call("-m", "trueline", "make-tiny", "config", str(model), "--config",
              str(directory / "config.json"), "--dtype", dtype)  # fmt: skip
        works = json.dumps([[w.batch, w.prompt_len, w.output_len] for w in STANDARD.values()])
        _say(f"measuring {peer}")
        theirs = json.loads(_call("-m", f"trueline.bench.peers.{peer}", str(model), works, _now()))
        _say("measuring trueline")
        ours = json.loads(
            _call("-m", "trueline.bench.workload", str(model), works, _now(), "plain")
        )
        _say("measuring trueline, batch-invariant")
        steady = json.loads(
            _call("-m", "trueline.bench.workload", str(model), works, _now(), "invariant")
        )
    report = comparison(list(STANDARD), ours, steady, theirs, peer)
    print(json.dumps(report, indent=1)) if as_json else _print_comparison(report, peer)


def comparison(names: list[str], ours: JSON, steady: JSON, theirs: JSON, peer: str) -> JSON:
    rows = []
    for name, a, s, b in zip(names, ours["results"], steady["results"], theirs["results"],
                             strict=True):  # fmt: skip
        rate = _prefill_rate if name.startswith("prefill") else _decode_rate
        rows.append({
            "workload": name,
            "trueline": rate(a, a),
            "batch_invariant": rate(s, a),
            peer: rate(b, a),
            "ratio": rate(a, a) / rate(b, a),
        })  # fmt: skip
    return {
        "rows": rows,
        "start_to_first_token_s": {"trueline": ours["ready_s"], peer: theirs["ready_s"]},
        "peer_version": theirs["version"],
    }


def _decode_rate(times: dict[str, float], work: dict[str, float]) -> float:
    steps = work["output_len"] - 1
    return work["batch"] * steps / (times["total_s"] - times["first_token_s"])


def _prefill_rate(times: dict[str, float], work: dict[str, float]) -> float:
    return work["batch"] * work["prompt_len"] / times["first_token_s"]


def _print_comparison(report: JSON, peer: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table("tokens/s", "trueline", "batch-invariant", peer, "ratio", box=box.SIMPLE_HEAD)
    for row in report["rows"]:
        cells = (f"{row[key]:.1f}" for key in ("trueline", "batch_invariant", peer))
        table.add_row(row["workload"], *cells, f"{row['ratio']:.2f} ×")
    console = tables()
    console.print(table)
    ready = report["start_to_first_token_s"]
    console.print(
        f"start to first token: trueline {ready['trueline']:.1f} s, {peer} {ready[peer]:.1f} s"
    )


def _print(rows: list[tuple[str, Figures]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: figures.as_json() for name, figures in rows}, indent=1))
        return
    for name, figures in rows:
        print(
            f"{name}: {figures.batch} requests of {figures.prompt_len} + {figures.output_len} "
            f"tokens: first tokens after {figures.first_token_s:.3f} s "
            f"({figures.prefill_tokens_per_s:.0f} tokens/s), then "
            f"{figures.decode_tokens_per_s:.1f} tokens/s"
        )


def _now() -> str:
    return repr(time.time())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _call(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UsageError(f"{' '.join(arguments[:3])} … failed; its words are above")
    return done.stdout
