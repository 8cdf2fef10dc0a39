"""`trueline generate`: continue texts with a model."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trueline.cli.arguments import parse_choices, parse_facts
from trueline.errors import UsageError
from trueline.utils.progress import human_bytes

if TYPE_CHECKING:
    from trueline.llm import LLM
    from trueline.outputs import RequestOutput


def generate(
    model: str,
    /,
    *,
    prompt: tuple[str, ...] = (),
    prompts_file: Path | None = None,
    chat: Annotated[bool, Parameter(negative=())] = False,
    max_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    n: int = 1,
    stop: tuple[str, ...] = (),
    ignore_eos: Annotated[bool, Parameter(negative=())] = False,
    logprobs: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    block_size: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    gpu_memory_utilization: float | None = None,
    enforce_eager: Annotated[bool, Parameter(negative=())] = False,
    batch_invariant: Annotated[bool, Parameter(negative=())] = False,
    op: tuple[str, ...] = (),
    layer: tuple[str, ...] = (),
    fact: tuple[str, ...] = (),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Continue one or more texts, and tell what ran: model, plan, memory, tokens per second.

    Parameters
    ----------
    model
        A model directory, or a hub id in the local cache.
    prompt
        Text to continue. May be given several times: all run together.
    prompts_file
        A file with one prompt per line.
    chat
        Each prompt is a user's message, put into the model's chat template.
    temperature
        0 takes the likeliest token every time.
    seed
        Makes the draws repeatable, whatever else runs.
    n
        How many continuations of each prompt.
    stop
        End a continuation at this text. May be given several times.
    logprobs
        With --json: list this many likeliest tokens at each position.
    block_size
        Positions in a cache block. Default: chosen by the plan.
    device
        auto is the GPU where there is one.
    gpu_memory_utilization
        How much of a GPU's memory is ours (0.9), or of the free memory for the cache (0.5).
    enforce_eager
        No captured decode steps on a GPU.
    batch_invariant
        The same bits for a request, whoever shares its steps.
    op
        Choose an implementation of an op, ours or an installed package's, as linear=torch_mm.
        May be given several times.
    layer
        Replace a kind of layer by an installed package's, as lightning=NAME. May be given
        several times.
    fact
        Override a fact that published sources contradict each other on, as NAME=VALUE
        (known: latent_norm_eps, linear_layer_factor). May be given several times.
    as_json
        Print one JSON object per prompt.
    quiet
        Do not print the account of what ran.
    """
    texts = _texts(prompt, prompts_file)
    from trueline.engine.params import SamplingParams
    from trueline.llm import LLM

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        seed=seed, n=n, stop=list(stop), ignore_eos=ignore_eos, logprobs=logprobs,
    )  # fmt: skip
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=block_size or "auto",
        device=device,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        ops=parse_choices("--op", op),
        layers=parse_choices("--layer", layer),
        facts=parse_facts(fact),
    )
    start = time.perf_counter()
    if chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    else:
        outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - start
    for output in outputs:
        print(json.dumps(_as_json(output), ensure_ascii=False) if as_json else _as_text(output))
    if not quiet:
        _print_account(llm, outputs, seconds)
    failed = any(
        completion.finish_reason == "error" for out in outputs for completion in out.outputs
    )
    return 1 if failed else 0


def _texts(prompt: tuple[str, ...], file: Path | None) -> list[str]:
    texts = list(prompt)
    if file is not None:
        try:
            texts += [line for line in file.read_text().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts-file {file}: not readable ({error})") from error
    if not texts:
        raise UsageError("give --prompt or --prompts-file")
    return texts


def _as_text(output: RequestOutput) -> str:
    lines = [f"> {output.prompt}"]
    for completion in output.outputs:
        mark = f"[{completion.index}] " if len(output.outputs) > 1 else ""
        lines.append(f"{mark}{completion.error or completion.text}")
    return "\n".join(lines)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "cumulative_logprob": completion.cumulative_logprob,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "error": completion.error,
                "logprobs": completion.logprobs
                and [
                    {str(token): [one.logprob, one.rank] for token, one in (each or {}).items()}
                    for each in completion.logprobs
                ],
            }
            for completion in output.outputs
        ],
    }


def _print_account(llm: LLM, outputs: list[RequestOutput], seconds: float) -> None:
    engine = llm.llm_engine
    tokens = sum(len(completion.token_ids) for out in outputs for completion in out.outputs)
    prompt = sum(len(out.prompt_token_ids) for out in outputs)
    startup = engine.startup_seconds
    phases = ", ".join(f"{name} {value:.1f}" for name, value in startup.items())
    lines = [
        f"model        {engine.spec.family}, {engine.spec.num_layers} layers",
        *engine.plan.lines(),
        *engine.plan.changes(engine.expected),
        f"ready in     {sum(startup.values()):.1f} s ({phases})",
        f"generated    {tokens} tokens after {prompt} prompt tokens in {seconds:.2f} s: "
        f"{tokens / seconds:.1f} tokens/s",
    ]
    print("\n" + "\n".join(lines), file=sys.stderr)
    if engine.plan.weight_bytes < 100_000_000:
        size = human_bytes(engine.plan.weight_bytes)
        print(f"({size} of weights: if they are random, so is the text)", file=sys.stderr)
