"""`trueline generate`: continue texts with a model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trueline.cli.arguments import model_or_default, parse_choices, parse_facts
from trueline.cli.completion import MODEL
from trueline.errors import UsageError
from trueline.utils.builtin import SAMPLE_PROBLEM, builtin_model
from trueline.utils.json_types import JSON
from trueline.utils.progress import human_bytes

if TYPE_CHECKING:
    from trueline.engine.params import SamplingParams
    from trueline.llm import LLM
    from trueline.outputs import RequestOutput


DEFAULT_MAX_TOKENS = 64


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSampling:
    """How tokens are drawn, as SamplingParams has it. What is not given is as the model's
    generation_config.json says."""

    max_tokens: int | None = None
    """Default: 64; of a built-in model, which ends its answers, as many as there is room for."""
    temperature: float | None = None
    """0 takes the likeliest token every time. Default: the model's own, or 1."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    """Makes the draws repeatable, whatever else runs."""
    n: int = 1
    """How many continuations of each prompt."""
    stop: tuple[str, ...] = ()
    """End a continuation at this text. May be given several times."""
    ignore_eos: Annotated[bool, Parameter(negative=())] = False
    logprobs: int | None = None
    """With --json: list this many likeliest tokens at each position."""

    def params(self, of_the_model: dict[str, Any]) -> SamplingParams:
        from trueline.engine.params import SamplingParams

        given = {item.name: getattr(self, item.name) for item in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        merged = {"max_tokens": DEFAULT_MAX_TOKENS} | of_the_model | given
        return SamplingParams(**merged | {"stop": list(self.stop)})


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineEngine:
    """The engine's options."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    """Positions in a cache block. Default: chosen by the plan."""
    kv_cache_dtype: str = "auto"
    """Of latents: auto (as computed), e4m3fn (also fp8, fp8_e4m3), e4m3fnuz."""
    numerics: Literal["auto", "weights", "activations", "published"] = "auto"
    """Of block fp8: weights (activations as computed), activations (in fp8 too). auto:
    activations on a GPU of compute capability 9.0. Of DeepSeek-V4: published (weights, and rows
    rounded as the authors' inference code does)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU where there is one."""
    gpu_memory_utilization: float | None = None
    """How much of a GPU's memory is ours (0.9), or of the free memory for the cache (0.5)."""
    enforce_eager: Annotated[bool, Parameter(negative=())] = False
    """No captured decode steps on a GPU."""
    batch_invariant: Annotated[bool, Parameter(negative=())] = False
    """The same bits for a request, whoever shares its steps."""
    canary_interval: int | Literal["auto"] = "auto"
    """Steps from one check to the next that nobody has written to memory where no step may; 0:
    never. auto: 32 on a CPU, 0 on a GPU."""
    canary_report_dir: str | None = None
    """Where the report of such a write goes. Default: the system's temporary directory."""
    poison: Annotated[bool, Parameter(negative=())] = False
    """Fill every cache byte that nobody owns with NaN before each step: slow, for checks."""
    tensor_parallel_size: int = 1
    """Ranks: processes that hold and compute a part of every layer each."""
    enable_expert_parallel: Annotated[bool, Parameter(negative=())] = False
    """Routed experts are divided whole among the ranks, not each of them by its width."""
    op: tuple[str, ...] = ()
    """Choose an implementation of an op, ours or an installed package's, as linear=torch_mm.
    May be given several times."""
    layer: tuple[str, ...] = ()
    """Replace a kind of layer by an installed package's, as lightning=NAME. May be given
    several times."""
    fact: tuple[str, ...] = ()
    """Override a fact that published sources contradict each other on, as NAME=VALUE
    (known: latent_norm_eps, linear_layer_factor). May be given several times."""

    def options(self) -> JSON:
        """As EngineConfig has them."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("op", "layer", "fact"):
            del given[name]
        return given | {
            "block_size": self.block_size or "auto",
            "ops": parse_choices("--op", self.op),
            "layers": parse_choices("--layer", self.layer),
            "facts": parse_facts(self.fact),
        }

    def load(self, model: str) -> LLM:
        from trueline.llm import LLM

        return LLM(model, **self.options())


def generate(
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    prompt: tuple[str, ...] = (),
    prompts_file: Path | None = None,
    chat: bool | None = None,
    sampling: OfflineSampling = OfflineSampling(),  # noqa: B008
    engine: OfflineEngine = OfflineEngine(),  # noqa: B008
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Continue one or more texts, and tell what ran: model, plan, memory, tokens per second.

    Parameters
    ----------
    model
        A model directory, a built-in model, or a hub id (owner/name). Default: the
        built-in witness-v3.
    prompt
        Text to continue. May be given several times: all run together. A built-in model has a
        problem of its own to solve where there is none.
    prompts_file
        A file with one prompt per line.
    chat
        Each prompt is a user's message, put into the model's chat template. Default: only for
        built-in models.
    as_json
        Print one JSON object per prompt.
    quiet
        Do not print the account of what ran.
    """
    name = model_or_default(model)
    builtin = builtin_model(name)
    texts = _texts(prompt, prompts_file) or ([SAMPLE_PROBLEM] if builtin else [])
    if not texts:
        raise UsageError("give --prompt or --prompts-file")
    sampling.params({})  # what is wrong with it is told before a model is loaded
    llm = engine.load(name)
    length = {"max_tokens": None} if builtin else {}
    params = sampling.params(llm.llm_engine.default_params | length)
    start = time.perf_counter()
    if builtin is not None if chat is None else chat:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    else:
        outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - start
    llm.llm_engine.core.close()  # with the canaries' last check
    for text, output in zip(texts, outputs, strict=True):
        shown = json.dumps(_as_json(output), ensure_ascii=False) if as_json else None
        print(shown or _as_text(text, output))
    if not quiet:
        _print_account(llm, outputs, seconds)
        if builtin is None:
            _doubt_small_weights(llm.llm_engine.plan.weight_bytes)
    completions = [each for output in outputs for each in output.outputs]
    return int(any(completion.finish_reason == "error" for completion in completions))


def _texts(prompt: tuple[str, ...], file: Path | None) -> list[str]:
    texts = list(prompt)
    if file is not None:
        try:
            texts += [line for line in file.read_text().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts-file {file}: not readable ({error})") from error
    return texts


def _as_text(asked: str, output: RequestOutput) -> str:
    lines = [f"> {asked}"]
    for completion in output.outputs:
        mark = f"[{completion.index}] " if len(output.outputs) > 1 else ""
        lines.append(f"{mark}{completion.error or completion.text}")
    return "\n".join(lines)


def _as_json(output: RequestOutput) -> JSON:
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
        *engine.plan_lines,
        f"ready in     {sum(startup.values()):.1f} s ({phases})",
        f"generated    {tokens} tokens after {prompt} prompt tokens in {seconds:.2f} s: "
        f"{tokens / seconds:.1f} tokens/s",
    ]
    print("\n" + "\n".join(lines), file=sys.stderr)


def _doubt_small_weights(weight_bytes: int) -> None:
    if weight_bytes < 100_000_000:
        size = human_bytes(weight_bytes)
        print(f"({size} of weights: if they are random, so is the text)", file=sys.stderr)
