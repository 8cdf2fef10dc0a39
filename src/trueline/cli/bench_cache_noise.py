"""`trueline bench cache-noise`: what latents in fp8 do to logprobs."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError


def cache_noise(
    model: str,
    /,
    *,
    prompts: int = 16,
    prompt_len: int = 128,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Logprobs of the same tokens with latents as computed and in fp8, at every position: what the
    cache's rounding does to a model.

    Parameters
    ----------
    model
        A built-in model, which is given solved problems; or a model directory, a config.json, or
        one of mid, mid-hybrid, mid-sparse, mid-v4, v2lite, ling25s, v32s, k25s (then weights are
        drawn), which are given random tokens.
    prompts
        How many.
    prompt_len
        Tokens of a prompt that is random.
    """
    if min(prompts, prompt_len) < 1:
        raise UsageError("--prompts and --prompt-len take numbers from 1 up")
    from rich import box
    from rich.table import Table

    from trueline.bench.cache_noise import cache_noise as measured

    found = measured(model, prompts, prompt_len)
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=1))
        return
    heads = ("latents", "mean KL", "worst KL", "worst logprob", "other tokens")
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in found:
        sizes = (f"{size:.2g}" for size in (each.mean_kl, each.worst_kl, each.worst_logprob))
        table.add_row(each.storage, *sizes, f"{each.others} of {each.positions}")
    tables().print(table)
