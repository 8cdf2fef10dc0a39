"""Tiny random transformers models of DeepSeek V4: the oracle that `reference/` answers to.

The values are chosen to make a wrong fact visible: all widths differ, no norm is all ones, rows are
small enough for the eps of their norms to matter, sinks, biases of positions and those of
hyper-connections are not zero, C is far from symmetric, gates exceed the clamp on both sides, every
hash layer has its own table of experts, and YaRN's ramp has channels on its slope.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from oracle import logprobs_of

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

EXACT_GATE = 1e-6
"""In logprob, to `exact_logprobs`: all that may differ is cos in float32, of which CPUs have two
versions one unit (6e-8) apart. Where this was written: 1e-14."""

D, H, HEAD, R, Q, GROUPS, O_RANK = 40, 6, 46, 14, 13, 3, 11
VOCAB, EXPERTS, TOP_K, WIDTH = 101, 12, 3, 19
INDEX_HEADS, INDEX_DIM = 17, 22
SLIDING, SPARSE, ALL = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 7.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
}


@dataclass(frozen=True)
class V4Case:
    name: str
    layers: tuple[str, ...] = (SLIDING, SPARSE, ALL, SPARSE)
    rates: tuple[int, int] = (3, 5)
    """Of sparse layers, of those that see all entries."""
    window: int = 7
    topk: int = 4
    hashed: int = 2
    streams: int = 4
    yarn: bool = True
    keys: dict[str, Any] = field(default_factory=dict, hash=False)

    def config(self) -> Any:
        fields: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": D,
            "moe_intermediate_size": WIDTH,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": H,
            "head_dim": HEAD,
            "qk_rope_head_dim": R,
            "q_lora_rank": Q,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "routed_scaling_factor": 1.7,
            "o_groups": GROUPS,
            "o_lora_rank": O_RANK,
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_DIM,
            "index_topk": self.topk,
            "layer_types": list(self.layers),
            "compress_rates": dict(zip((SPARSE, ALL), self.rates, strict=True)),
            "num_hash_layers": self.hashed,
            "sliding_window": self.window,
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": 5,
            "hc_eps": 1e-3,
            "swiglu_limit": 0.6,
            "rms_norm_eps": 1e-4,
            "rope_theta": 300.0,
            "compress_rope_theta": 700.0,
            "max_position_embeddings": 168,
        }
        if self.yarn:
            fields["rope_scaling"] = dict(YARN)
        return transformers.DeepseekV4Config(**(fields | self.keys))


@dataclass(frozen=True)
class V4Checkpoint:
    path: Path
    model: Any

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[T, vocab] in float64, with transformers' own float32 inside."""
        return logprobs_of(self.model.double(), tokens, torch.arange(len(tokens)))

    def exact_logprobs(self, tokens: Tensor) -> Tensor:
        """The same without it."""
        with in_float64():
            return self.logprobs(tokens)


class _Float64Torch:
    """torch, in whose name `float32` is float64. The rope table says `torch.float`, and keeps it: a
    finer table is a different function."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.to(torch.float32)


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers casts norms, rotations, softmax, index scores and hyper-connections to float32
    in a float64 model too; here it does not."""
    with (
        patch.object(modeling_deepseek_v4, "torch", _Float64Torch()),
        patch.object(torch.Tensor, "float", _double),
    ):
        yield


def make(case: V4Case, path: Path, **save: Any) -> V4Checkpoint:
    config = case.config()
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    fill(model, case.name)
    model.save_pretrained(path, **save)
    return V4Checkpoint(path, model)


@torch.no_grad()
def fill(model: Any, name: str) -> None:
    """By name, in the order of names: the values depend on the seed and nothing else."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    for key, tensor in sorted(model.state_dict().items()):
        *_, module, last = key.split(".")
        if last == "tid2eid":
            tensor.copy_(torch.rand(VOCAB, EXPERTS, generator=generator).argsort(1)[:, :TOP_K])
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in module:
            tensor.copy_(1.0 + 0.3 * noise)
        elif last in ADDED:
            mean, spread = ADDED[last]
            tensor.copy_(mean + spread * noise)
        else:
            gain = GAINS.get(module, GAINS.get(last, 1.0))
            tensor.copy_(noise * gain * tensor.shape[-1] ** -0.5)


ADDED = {
    "sinks": (0.5, 1.0),
    "position_bias": (0.0, 1.0),
    "base": (0.0, 1.0),
    "hc_base": (0.0, 1.0),
    "scale": (1.0, 0.3),
    "hc_scale": (1.0, 0.3),
    "e_score_correction_bias": (-0.7, 0.5),
}
GAINS = {"embed_tokens": 2.0, "lm_head": 1.4, "q_a_proj": 0.03, "kv_proj": 0.05, "gate": 2.5}
