"""What latents in fp8 do to a model's logprobs, at every position of the same tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.bench.models import find_bench_model
from trueline.bench.workload import Workload
from trueline.cache.kinds.latent import Latent
from trueline.config import EngineConfig
from trueline.models import read_model
from trueline.tasks.stories import problems
from trueline.text.chat import render_chat
from trueline.text.tokenizer import Tokenizer
from trueline.utils.builtin import builtin_model
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask, EngineRun, run

STORAGES: tuple[JSON, ...] = (
    {"kv_cache_dtype": "e4m3fn"},
    {"kv_cache_dtype": "e4m3fn", "kv_cache_scale_fmt": "ue8m0"},
    {"kv_cache_dtype": "e4m3fn", "kv_cache_group_size": 64},
    {"kv_cache_dtype": "e4m3fn", "kv_cache_group_size": "token"},
    {"kv_cache_dtype": "e4m3fnuz"},
)


@dataclass(frozen=True)
class Noise:
    storage: str
    token_bytes: int
    """Of a cache row."""
    positions: int
    mean_kl: float
    """Of next-token distributions, exact to stored, in nats."""
    worst_kl: float
    worst_logprob: float
    """The largest change of the logprob of a token that was the likeliest."""
    others: int
    """Positions whose likeliest token is another."""

    def as_json(self) -> JSON:
        return asdict(self)


def cache_noise(model: str, prompts: int, length: int) -> list[Noise]:
    path, has_weights = find_bench_model(model)
    asks = [Ask(tokens, 1) for tokens in noise_prompts(model, path, prompts, length)]
    config = EngineConfig(
        max_num_seqs=prompts,
        enable_prefix_caching=False,
        enforce_eager=True,
        load_format="auto" if has_weights else "dummy",
    )
    exact = run(path, asks, config)
    found = (_compared(exact, run(path, asks, config, **storage)) for storage in STORAGES)
    # a latent of no more channels than a group has is one group however it is asked for
    return list({noise.storage: noise for noise in found}.values())


def noise_prompts(model: str, path: Path, count: int, length: int) -> list[list[int]]:
    """Solved problems, as it was trained on them, of a built-in model; else random tokens."""
    if builtin_model(model) is None:
        return Workload(count, length, 1).prompts(read_model(path).vocab.total)
    tokenizer = Tokenizer.load(path)
    texts = (
        render_chat(tokenizer, [{"role": "user", "content": problem.question}]) + problem.solution
        for problem in problems("4 operations", "test", count)
    )
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _compared(exact: EngineRun, stored: EngineRun) -> Noise:
    kind = stored.core.plan.kind(Latent)
    assert kind is not None
    ours, theirs = (_logprobs(done) for done in (stored, exact))
    kl = (theirs.exp() * (theirs - ours)).sum(-1)
    best = theirs.argmax(-1, keepdim=True)
    moved = (theirs - ours).gather(-1, best).abs()
    return Noise(
        storage=str(kind),
        token_bytes=kind.layout.row_bytes(kind.dtype.itemsize),
        positions=len(kl),
        mean_kl=float(kl.mean()),
        worst_kl=float(kl.max()),
        worst_logprob=float(moved.max()),
        others=int((ours.argmax(-1, keepdim=True) != best).sum()),
    )


def _logprobs(done: EngineRun) -> Tensor:
    """[positions of all requests, vocabulary]."""
    rows = [each[p] for each in done.logits for p in sorted(each)]
    return torch.stack(rows).double().log_softmax(-1)
