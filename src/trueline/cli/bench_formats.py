"""`trueline bench formats`: one model in several weight formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from trueline.bench.formats import FormatFigures, GemmFigures
    from trueline.llm import LLMEngine

FormatName = Literal["float32", "bfloat16", "block-fp8", "block-fp8-ue8m0", "int4", "fp4"]
NOISY: tuple[FormatName, ...] = ("block-fp8", "block-fp8-ue8m0", "int4", "fp4")


def formats(
    model: str,
    /,
    *,
    format: tuple[FormatName, ...] = (),
    batch: tuple[int, ...] = (1, 8),
    output_len: int = 33,
    rounds: int = 5,
    gemm: Annotated[bool, Parameter(negative=())] = False,
    noise: Annotated[bool, Parameter(negative=())] = False,
    prompts: int = 8,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Decode rates of one model whose weights are drawn in several formats, measured in turn.

    Parameters
    ----------
    model
        A config.json, a model directory, or one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite,
        ling25s, v32s, k25s. Weights are drawn.
    format
        May be given several times; the ratios are over the first. block-fp8 has all matrices but
        the head's, int4 and fp4 the routed experts, as published; the rest is bfloat16. Default:
        float32, bfloat16, block-fp8, int4; with --noise all that are quantised.
    batch
        Requests at once. May be given several times.
    output_len
        Tokens of each request.
    rounds
        To take the medians of, after one to warm up. Each has every format once.
    gemm
        Time our CPU kernel on one matrix of 16,384 x 8,192 instead, with so many rows as `batch`
        says.
    noise
        Quantise the weights of a checkpoint instead, and compare logprobs at every position of the
        same tokens, in each of the format's numerics, with the reference in float64.
    prompts
        With --noise: how many; solved problems for a built-in model, else random tokens.
    as_json
        Print the figures of every round as JSON.
    """
    if noise:
        _noise(model, format or NOISY, prompts, as_json)
        return
    format = format or ("float32", "bfloat16", "block-fp8", "int4")
    if min(*batch, rounds) < 1 or output_len < 2:
        raise UsageError("--batch and --rounds take numbers above 0, --output-len above 1")
    from trueline import native
    from trueline.bench.formats import format_engine, measure_formats, measure_gemm

    if gemm:
        if reason := native.unavailable():
            raise UsageError(f"--gemm: no native kernels here: {reason}")
        times = measure_gemm(format, batch, rounds)
        if as_json:
            print(json.dumps([each.as_json() for each in times], indent=1))
        else:
            _print_gemm(times)
        return
    engines: dict[str, LLMEngine] = {}
    for name in format:
        _say(f"drawing weights in {name}")
        engines[name] = format_engine(model, name, max_num_seqs=max(batch))
    found = measure_formats(engines, batch, output_len, rounds, _say)
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
    else:
        _print(found)


def _noise(model: str, names: Sequence[FormatName], prompts: int, as_json: bool) -> None:
    if prompts < 1:
        raise UsageError("--prompts takes numbers from 1 up")
    from rich import box
    from rich.table import Table

    from trueline.bench.format_noise import format_noise

    found = format_noise(model, names, prompts, _say)
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
        return
    table = Table("format", "numerics", "mean KL", "worst KL", "top-1", box=box.SIMPLE_HEAD)
    for each in found:
        band = each.noise
        sizes = (f"{size:.2g}" for size in (band.mean_kl, band.worst_kl))
        share = f"{100 * band.top1:.1f} % of {band.positions}"
        table.add_row(each.format, each.numerics, *sizes, share)
    tables().print(table)


def _print_gemm(figures: list[GemmFigures]) -> None:
    from rich import box
    from rich.table import Table

    base = {each.rows: each for each in reversed(figures)}  # the first of each
    heads = ("rows", "format", "MB", "ms", "best ms", "CPU ms", f"over {figures[0].format}",
             "in CPU time")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in figures:
        first = base[each.rows]
        cpu = median(each.cpu_seconds)
        pairs = zip(each.seconds, first.seconds, strict=True)
        table.add_row(
            *(str(each.rows), each.format, f"{each.weight_bytes / 1e6:,.0f}"),
            *(f"{1e3 * taken:.1f}" for taken in (median(each.seconds), min(each.seconds), cpu)),
            f"{median(theirs / ours for ours, theirs in pairs):.2f}",
            f"{median(first.cpu_seconds) / cpu:.2f}",
        )
    tables().print(table)


def _print(figures: list[FormatFigures]) -> None:
    from rich import box
    from rich.table import Table

    base = {each.batch: each for each in reversed(figures)}  # the first of each
    first = figures[0].format
    heads = ("requests", "format", "weights MB", "tokens/s", f"over {first}", "lowest", "highest")
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in figures:
        pairs = zip(each.rates, base[each.batch].rates, strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        table.add_row(
            *(str(each.batch), each.format, f"{each.weight_bytes / 1e6:,.0f}"),
            *(f"{each.tokens_per_s:.1f}", f"{median(ratios):.2f}"),
            *(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))),
        )
    tables().print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
