"""`trueline bench context`: what a long context costs, in time and memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.context import ContextFigures


def context(
    model: str,
    /,
    *,
    length: tuple[int, ...] = (128, 8192),
    batch: int = 8,
    steps: int = 32,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    beside: tuple[str, ...] = (),
    beside_dense: Annotated[bool, Parameter(negative=())] = False,
    plot: Path | None = None,
    plot_cpu: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """What a long context costs: decode steps, the part of them outside attention over the paged
    cache, prefill, and the memory of a sequence: by what is kept beside what the model's spec says,
    and beside the same model all-latent.

    Parameters
    ----------
    model
        A model directory, a config.json, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s (then weights are drawn).
    length
        Tokens of context. May be given several times.
    batch
        Requests at once; they share one prompt, whose cache is filled with random numbers.
    steps
        Decode steps to take the median of.
    dtype
        Of weights and cache; auto is the config's.
    beside
        Another model to measure, one after the other. May be given several times.
    beside_dense
        Measure the last of the models, a sparse one, also with attention over everything.
    plot
        Draw tokens per second against context into this file (.svg or .png).
    plot_cpu
        Draw the processor time of a decode step into this file; dotted, the part in attention.
    """
    from trueline.bench import context as contexts
    from trueline.bench.context_plot import plot_contexts

    asked, models = (list(length), batch, steps), (model, *beside)
    names = [_name(each) for each in models]
    if len(set(names)) < len(names):
        raise UsageError(f"--beside: {', '.join(names)}: models of different names are accepted")
    series, prefill = {}, {}
    for name, each in zip(names, models, strict=True):
        engine = contexts.context_engine(each, *asked, dtype)
        _say(f"{name}: prefill")
        prefill[name] = contexts.prefill_rate(engine, min(max(length), 2048))
        series[name] = contexts.measure_contexts(engine, *asked, _say)
        del engine  # its memory is wanted
    if beside_dense:
        dense = contexts.dense_engine(models[-1], *asked, dtype)
        series[f"{names[-1]} dense"] = contexts.measure_contexts(dense, *asked, _say)
    if plot:
        plot_contexts(plot, series, f"batch {batch}")
    if plot_cpu:
        plot_contexts(plot_cpu, series, f"batch {batch}", cpu=True)
    if as_json:
        rows = {name: [each.as_json() for each in figures] for name, figures in series.items()}
        print(json.dumps({"prefill_tokens_per_s": prefill, "decode": rows}, indent=1))
        return
    for name, figures in series.items():
        _print(name, figures)
        if name in prefill:
            print(f"prefill: {prefill[name]:.0f} tokens/s")


def _name(model: str) -> str:
    path = Path(model)
    return (path.parent if path.suffix == ".json" else path).name or model


def _print(name: str, figures: list[ContextFigures]) -> None:
    from rich import box
    from rich.table import Table

    heads = ("context", "tokens/s", "step ms", "attention", "rest", "CPU ms", "attention",
             "MB / sequence", "all-latent MB")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in figures:
        times = (each.tokens_per_s, each.step_ms, each.attention_ms, each.rest_ms, each.cpu_ms,
                 each.attention_cpu_ms)  # fmt: skip
        alike = "" if each.all_latent_bytes is None else f"{each.all_latent_bytes / 1e6:.2f}"
        mine = f"{each.sequence_bytes / 1e6:.2f}"
        table.add_row(f"{each.context:,}", *(f"{value:.2f}" for value in times), mine, alike)
    print(f"{name}:")
    tables().print(table)
    ends = figures[-1].rest_ms / figures[0].rest_ms
    print(f"rest at {figures[-1].context:,} / rest at {figures[0].context:,}: {ends:.2f}")
    _print_kinds(figures)


def _print_kinds(figures: list[ContextFigures]) -> None:
    """Of a token where it grows with the context, of a sequence where it does not."""
    from rich import box
    from rich.table import Table

    heads = ("kept", "layers", "context", "by the spec, bytes", "held", "a token: by the spec",
             "held")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for first, *others in zip(*(each.kinds for each in figures), strict=True):
        for each in (first, *others[-1:]):
            whole = (f"{each.formula:,}", f"{each.held:,}")
            token = (f"{size / each.positions:,.1f}" for size in (each.formula, each.held))
            table.add_row(each.kind, str(each.layers), f"{each.positions:,}", *whole, *token)
    tables().print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
