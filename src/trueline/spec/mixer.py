"""Token mixing: what a layer's attention is, and the softmax scale that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from trueline.spec.rope import RopeSpec
from trueline.spec.source import Span, Spec


@dataclass(frozen=True, slots=True)
class CacheField:
    """Numbers a mixer keeps, per token (paged) or per sequence (state). Never divided by rank
    for MLA: one latent row serves every head."""

    name: str
    width: int
    per: Literal["token", "sequence"]


@dataclass(frozen=True, kw_only=True)
class MLASpec(Spec):
    """Multi-head latent attention. Each query head is [nope | rope]; each kv_b head is
    [key nope | value]; one latent and one rotated key per token serve all heads."""

    heads: Span
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    """Of q_a_layernorm and kv_a_layernorm; not rms_norm_eps in transformers."""
    rope: RopeSpec

    DERIVED: ClassVar[Mapping[str, str]] = {
        "qk_head_dim": "qk_nope_head_dim + qk_rope_head_dim",
        "softmax_scale": "qk_head_dim^-0.5 × rope.score_scale",
    }

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.qk_head_dim**-0.5 * self.rope.score_scale)

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        return (
            CacheField("latent", self.kv_lora_rank, "token"),
            CacheField("rope_key", self.qk_rope_head_dim, "token"),
        )


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(Spec):
    """DeepSeek-V4 attention: a sliding window, plus (ratio > 0) compressed entries. Resolved for
    `inspect`; not runnable yet. The rope part is the last `rope.dim` of `head_dim`."""

    heads: Span
    head_dim: int
    compress_ratio: int
    sliding_window: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    rope: RopeSpec

    DERIVED: ClassVar[Mapping[str, str]] = {
        "softmax_scale": "head_dim^-0.5; DeepSeek-V4 applies no mscale"
    }

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


MixerSpec = MLASpec | CompressedSpec
