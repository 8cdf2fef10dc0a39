"""Token mixing: what a layer's attention is, and the softmax scale that goes with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, Self

from trueline.spec.parameters import Parameter
from trueline.spec.rope import RopeSpec
from trueline.spec.source import Span, Spec


@dataclass(frozen=True, slots=True)
class CacheField:
    """Numbers a mixer keeps, per token (paged) or per sequence (state). Never divided by rank
    for MLA: one latent row serves every head."""

    name: str
    width: int
    per: Literal["token", "sequence"]
    tokens: int = 1
    """Of "token": how many share these numbers."""
    model_dtype: bool | None = None
    """Whether they are kept in the model's dtype, not in float32. None: those of tokens are."""

    @property
    def in_model_dtype(self) -> bool:
        return self.per == "token" if self.model_dtype is None else self.model_dtype


class Divide(Protocol):
    def __call__(self, span: Span, what: str, *, replicable: bool = False) -> Span:
        """This rank's part of a dimension, by what it is called: an error where it cannot be
        divided. `replicable`: all of it where there are more ranks than it has parts."""


HEADS = "the number of attention heads"


@dataclass(frozen=True, kw_only=True)
class MixerSpec(Spec):
    """Token mixing of a layer. Packages bring their own: subclasses with `parameters`."""

    label: ClassVar[str]
    """Of the layers that compute it (docs/plugins.md)."""

    @property
    def rotation(self) -> RopeSpec | None:
        """By which its layer is given tables; None where nothing rotates."""
        return None

    @property
    def kind(self) -> str:
        """What reports call layers that keep the same."""
        return self.label

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        """For reports; the state kinds of the model decide what is kept, and how."""
        return ()

    def divided(self, part: Divide) -> Self:
        """What one rank computes."""
        raise NotImplementedError(f"{self.label}: how it is divided among ranks")

    def whole(self) -> Self:
        """What the checkpoint holds."""
        raise NotImplementedError(f"{self.label}: what of it is divided among ranks")

    def parameters(self, name: str, hidden: int, outputs: Span | None) -> Iterator[Parameter]:
        """Of a package's mixer; ours are in models/parameters.py. `outputs`: see `ModelSpec`."""
        raise NotImplementedError(f"{self.label}: its parameters")


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(Spec):
    """Which keys a layer's queries may see: the `topk` with the largest index score, all of them
    where there are no more. score = Σ_h head_weight w_h relu(scale q_h·k), with q of the normalised
    query latent, one k per token (layer norm with weight and bias), and w of the layer's normalised
    input, in float32 at least. Of equal scores the lowest position wins."""

    heads: int
    """Never divided over ranks: each selects the same keys."""
    head_dim: int
    topk: int
    rope: RopeSpec
    """Rotates the first `rope.dim` channels of q and k; its pairing may not be that of the layer's
    attention."""
    key_norm_eps: float
    shared: bool
    """Whether the layer has no indexer of its own and sees what the last full layer selected."""

    DERIVED: ClassVar[Mapping[str, str]] = {
        "scale": "head_dim^-0.5; YaRN's mscale has no part in it",
        "head_weight": "heads^-0.5",
    }

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def head_weight(self) -> float:
        return float(self.heads**-0.5)


@dataclass(frozen=True, kw_only=True)
class MLASpec(MixerSpec):
    """Multi-head latent attention. Each query head is [nope | rope]; each kv_b head is
    [key nope | value]; one latent and one rotated key per token serve all heads. With an indexer,
    the softmax runs over the selected keys only."""

    label: ClassVar[str] = "mla"

    heads: Span
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    """Of q_a_layernorm and kv_a_layernorm; not rms_norm_eps in transformers."""
    rope: RopeSpec
    indexer: IndexerSpec | None = None

    DERIVED: ClassVar[Mapping[str, str]] = {
        "qk_head_dim": "qk_nope_head_dim + qk_rope_head_dim",
        "softmax_scale": "qk_head_dim^-0.5 × rope.score_scale",
    }

    @property
    def rotation(self) -> RopeSpec | None:
        return self.rope

    def divided(self, part: Divide) -> Self:
        return replace(self, heads=part(self.heads, HEADS, replicable=True))

    def whole(self) -> Self:
        return replace(self, heads=Span.whole(self.heads.total))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return float(self.qk_head_dim**-0.5 * self.rope.score_scale)

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        latent = (
            CacheField("latent", self.kv_lora_rank, "token"),
            CacheField("rope_key", self.qk_rope_head_dim, "token"),
        )
        if self.indexer is None or self.indexer.shared:
            return latent
        return (*latent, CacheField("index_key", self.indexer.head_dim, "token"))


Form = Literal["window", "sparse", "all"]
"""What a layer of DeepSeek-V4 sees beside its window: nothing, the compressed entries that an
indexer selects, or all compressed entries."""


@dataclass(frozen=True, kw_only=True)
class CompressorSpec(Spec):
    """Entry w of tokens ratio w .. ratio w + ratio - 1: Σ softmax(z + position_bias) u per channel,
    normed, its last channels rotated as at the first of these tokens. u and z are projections of
    the layer's normalised input."""

    ratio: int
    overlap: bool
    """Whether an entry also pools the tokens of the window before, through the first half of the
    width; its own then go through the second half."""
    dim: int
    """Of an entry."""

    DERIVED: ClassVar[Mapping[str, str]] = {
        "width": "of u and z: dim, twice that where windows overlap",
        "tail": "positions whose u and z a later entry may need: ratio, 2 ratio with overlap",
    }

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)

    @property
    def tail(self) -> int:
        return self.ratio * (2 if self.overlap else 1)


@dataclass(frozen=True, kw_only=True)
class EntryIndexerSpec(Spec):
    """Which entries a query of form "sparse" sees: the `topk` with the largest index score, all of
    them where there are no more. score = Σ_h head_weight w_h relu(scale q_h·k), with q of the
    normalised query latent, rotated as the layer's own, and k of a compressor of its own. Of equal
    scores the earliest entry wins."""

    heads: int
    """Never divided over ranks: each selects the same entries."""
    head_dim: int
    topk: int
    compressor: CompressorSpec

    DERIVED: ClassVar[Mapping[str, str]] = {
        "scale": "head_dim^-0.5; YaRN's mscale has no part in it",
        "head_weight": "heads^-0.5",
    }

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def head_weight(self) -> float:
        return float(self.heads**-0.5)


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(MixerSpec):
    """DeepSeek-V4 attention: one softmax over a sliding window, compressed entries and a sink per
    head, which has no value. One row per position is key and value of all heads; it and each query
    head are normed, then their last `rope.dim` channels are rotated, and those of the output are
    rotated back. The heads of a group share a projection to o_lora_rank."""

    label: ClassVar[str] = "compressed"

    heads: Span
    head_dim: int
    window: int
    """Positions that a query sees as they are, its own included."""
    form: Form
    compressor: CompressorSpec | None
    """None for form "window"."""
    indexer: EntryIndexerSpec | None
    """For form "sparse" only."""
    q_lora_rank: int
    o_groups: Span
    """Of as many heads each; a rank has whole groups."""
    o_lora_rank: int
    norm_eps: float
    """Of all its norms."""
    rope: RopeSpec

    DERIVED: ClassVar[Mapping[str, str]] = {
        "softmax_scale": "head_dim^-0.5; DeepSeek-V4 applies no mscale"
    }

    @property
    def rotation(self) -> RopeSpec | None:
        return self.rope

    def divided(self, part: Divide) -> Self:
        heads, groups = part(self.heads, HEADS, replicable=True), self.o_groups
        if not heads.is_whole:
            groups = part(groups, "the number of output groups")
        return replace(self, heads=heads, o_groups=groups)

    def whole(self) -> Self:
        heads, groups = self.heads.total, self.o_groups.total
        return replace(self, heads=Span.whole(heads), o_groups=Span.whole(groups))

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def kind(self) -> str:
        return f"{self.label}, {self.form}"

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        """Rows behind the window are let go: those inside are a sequence's, whatever its length."""
        window = self.window * self.head_dim
        kept = [CacheField("window", window, "sequence", model_dtype=True)]
        pools = {"entries": self.compressor}
        pools["index entries"] = self.indexer.compressor if self.indexer else None
        for name, pool in pools.items():
            if pool is not None:
                tail = 2 * pool.width * pool.tail
                kept.append(CacheField(name, pool.dim, "token", tokens=pool.ratio))
                kept.append(CacheField(f"tails of {name}", tail, "sequence"))
        return tuple(kept)


LayerFactor = Literal["l", "l-1"]


@dataclass(frozen=True, kw_only=True)
class LightningSpec(MixerSpec):
    """Linear attention with one decay per head: S = exp(-slope) S + kᵀv, then o = scale × q S, so a
    token sees itself. q, k, v are silu'd (silu), q and k normed per head (qk_norm) and their first
    `rope.dim` channels rotated; o is normed in groups of channels, multiplied by the sigmoid of a
    gate of the layer's normalised input, and projected."""

    label: ClassVar[str] = "lightning"

    heads: Span
    head_dim: int
    rope: RopeSpec | None
    """None where nothing rotates."""
    qk_norm: bool
    silu: bool
    norm_groups: Span
    """Into how many groups the output norm cuts heads × head_dim channels; a group may cut a
    head, but not cross ranks."""
    norm_eps: float
    """Of the norms of q, k and output."""
    linear_layer_factor: LayerFactor
    """Whether layer l decays as l or as l - 1 says: published sources disagree."""
    layer: int
    """Its place among all layers, of whatever kind."""
    num_layers: int

    PLACE: ClassVar[tuple[str, ...]] = ("layer",)
    DERIVED: ClassVar[Mapping[str, str]] = {
        "scale": "head_dim^-0.5",
        "slope_ends": "first and last head here: 2^(-8(h+1)/H) for H a power of two; else that "
        "of the power below H, then every second one of the power above",
        "factor_ends": "what multiplies the slopes of the first and last layer: "
        "1 - l/(N-1) + 1e-5, with l - 1 for l where linear_layer_factor says so",
    }

    @property
    def rotation(self) -> RopeSpec | None:
        return self.rope

    def divided(self, part: Divide) -> Self:
        heads, groups = part(self.heads, HEADS, replicable=True), self.norm_groups
        if not heads.is_whole:
            groups = part(groups, "the number of groups of the output norm")
        return replace(self, heads=heads, norm_groups=groups)

    def whole(self) -> Self:
        heads, groups = self.heads.total, self.norm_groups.total
        return replace(self, heads=Span.whole(heads), norm_groups=Span.whole(groups))

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def slopes(self) -> tuple[float, ...]:
        """Of this rank's heads, in this layer: the state decays by exp(-slope) a token."""
        factor = self._factor(self.layer)
        return tuple(slope * factor for slope in self._head_slopes)

    @property
    def slope_ends(self) -> tuple[float, float]:
        return self._head_slopes[0], self._head_slopes[-1]

    @property
    def factor_ends(self) -> tuple[float, float]:
        return self._factor(0), self._factor(self.num_layers - 1)

    @property
    def _head_slopes(self) -> tuple[float, ...]:
        return head_slopes(self.heads.total)[self.heads.start : self.heads.stop]

    def _factor(self, layer: int) -> float:
        place = layer if self.linear_layer_factor == "l" else layer - 1
        return 1 - place / (self.num_layers - 1) + 1e-5

    @property
    def cache_fields(self) -> tuple[CacheField, ...]:
        return (CacheField("state", self.heads.count * self.head_dim**2, "sequence"),)


def head_slopes(heads: int) -> tuple[float, ...]:
    """What each of `heads` heads decays by, before its layer's factor."""
    below = 1 << heads.bit_length() - 1
    exact = tuple(2.0 ** (-8 * (head + 1) / below) for head in range(below))
    if below == heads:
        return exact
    return exact + head_slopes(2 * below)[::2][: heads - below]
