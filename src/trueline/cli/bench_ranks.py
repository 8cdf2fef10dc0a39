"""`trueline bench ranks`: a model on several ranks, rehearsed on one device."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from trueline.bench.ranks.rehearsal import Rehearsal

GB = 1e9


def ranks(
    config: str,
    /,
    *more: str,
    tensor_parallel_size: int = 8,
    enable_expert_parallel: Annotated[bool, Parameter(negative=())] = False,
    requests: str = "1,16,64,256",
    context: int = 1024,
    prefill_tokens: int = 8192,
    depth: int = 2,
    kv_cache_dtype: str = "auto",
    gpu_memory_gb: float | None = None,
    gpu_memory_utilization: float | None = None,
    all_reduce_latency_us: float = 20.0,
    interconnect_gbps: float = 300.0,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Plan a deployment on several GPUs with one: what one tensor-parallel rank computes at its
    local shapes is measured here with random weights, what ranks exchange is counted and given a
    stated cost, and decode, prefill and memory of the whole are projected, with all assumptions.

    Parameters
    ----------
    config
        A config.json, a model directory, or a config that comes with the package: deepseek-v3,
        deepseek-v3.2, kimi-k2.5, glm-5-fp8 (whole models, as published), or one of mid,
        mid-hybrid, mid-sparse, mid-v4, v2lite, ling25s, v32s, k25s. Weights are drawn in the
        config's own stored format.
    more
        Further ones, one after the other.
    tensor_parallel_size
        Ranks.
    enable_expert_parallel
        Routed experts stay whole, each on one rank; otherwise every rank has a part of each.
    requests
        Numbers of requests that decode at once, separated by commas.
    context
        Positions that each request has in the cache, and tokens of each prompt.
    prefill_tokens
        Of a prefill step.
    depth
        A layer's time is the difference to a model that has so many more layers of its kind.
    kv_cache_dtype
        Of latents: auto (as computed), e4m3fn (also fp8, fp8_e4m3), e4m3fnuz.
    gpu_memory_gb
        Of each rank's GPU. Default: as much as this device has.
    gpu_memory_utilization
        How much of it is ours. Default: 0.9 on a GPU, 0.5 on a CPU.
    all_reduce_latency_us
        Microseconds of one collective, whatever its size.
    interconnect_gbps
        Gigabytes a second of a collective's bytes: bus bandwidth, as nccl-tests defines it. This
        and the latency are NCCL's in one machine of 8 GPUs (docs/ranks.md).
    """
    from trueline.bench.ranks.projection import Interconnect
    from trueline.bench.ranks.rehearsal import Scenario, rehearse

    if all_reduce_latency_us < 0 or interconnect_gbps <= 0:
        raise UsageError("--all-reduce-latency-us and --interconnect-gbps take positive numbers")
    scenario = Scenario(
        interconnect=Interconnect(
            tensor_parallel_size, 1e-6 * all_reduce_latency_us, GB * interconnect_gbps
        ),
        expert_parallel=enable_expert_parallel,
        requests=_numbers(requests),
        context=context,
        prefill_tokens=prefill_tokens,
        depth=depth,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory=None if gpu_memory_gb is None else round(GB * gpu_memory_gb),
        gpu_memory_utilization=gpu_memory_utilization,
    )
    found = []
    for name in (config, *more):
        found.append(rehearse(name, scenario, _say))
        if not as_json:
            _print(tables(), found[-1])
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--requests {text}: accepted: whole numbers separated by commas, as in 1,16,64"
        ) from None


def _print(console: Console, found: Rehearsal) -> None:
    from rich import box
    from rich.table import Table

    link, memory = found.scenario.interconnect, found.memory
    console.print(f"{found.model} on {link.ranks} ranks, projected")
    heads = ("step", "tokens/s", "per request", "ms", "compute", "exchange", "roofline",
             "all-reduces", "MB", "all-gathers", "MB")  # fmt: skip
    table = Table(*heads, box=box.SIMPLE_HEAD)
    names = [f"decode, {each.requests} at {found.scenario.context:,}" for each in found.decode]
    prefill = f"prefill, {found.prefill.tokens:,} tokens"
    for name, each in zip((*names, prefill), (*found.decode, found.prefill), strict=True):
        row = each.as_json()
        roofline = row["roofline_ms"]
        table.add_row(
            name,
            *(f"{row[key]:,.1f}" for key in ("tokens_per_s", "tokens_per_s_and_request")),
            *(f"{row[key]:,.3f}" for key in ("step_ms", "compute_ms", "exchange_ms")),
            "–" if roofline is None else f"{roofline:,.3f}",
            *(f"{row['all_reduces']:,.0f}", f"{row['reduced_bytes'] / 1e6:,.2f}"),
            *(f"{row['all_gathers']:,.0f}", f"{row['gathered_bytes'] / 1e6:,.2f}"),
        )
    console.print(table)
    sequences = max(found.scenario.requests)
    tokens = memory.tokens(sequences)
    console.print(
        f"memory of a rank: weights {memory.weights / GB:,.2f} GB, cache "
        f"{memory.token / 1e3:,.1f} kB a token, {memory.budget / GB:,.1f} GB left for it: "
        + (f"{tokens:,} tokens" if tokens else "[bold]does not fit[/bold]")
    )
    if memory.sequence:
        console.print(f"states: {memory.sequence / 1e6:,.2f} MB a sequence, {sequences} of them")
    console.print("assumed:")
    for line in found.assumptions():
        console.print(f"- {line}")
    console.print(f"measured in {found.seconds:.1f} s\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
