"""Every parameter of a model, its shape on this rank, and the checkpoint tensors that fill it.

One table serves the ledger, the loader, the parameter counts and `make-tiny`. A parameter has the
same name in every family, the one that most of them publish; its pieces have the names of the
family's own files. The experts of a layer are one stacked parameter, under the name that
transformers gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Literal

from trueline.errors import ConfigError
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import IndexerSpec, LightningSpec, MLASpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.source import Span

ParameterKind = Literal[
    "embedding",
    "head",
    "norm",
    "norm_bias",
    "matrix",
    "router",
    "correction_bias",
    "index_weights",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored tensor, the part of it that this rank takes, and where it goes."""

    source: str
    shape: tuple[int, ...]
    """As stored, before any division."""
    take: tuple[slice, ...] = ()
    put: tuple[int | slice, ...] = ()
    runs: int = 1
    """Equal runs of rows that are divided alike, as Q, K and V of one matrix; `take` is of the
    first."""

    def split(self) -> Iterator[Piece]:
        """One piece per run."""
        if self.runs == 1:
            yield self
            return
        rows = self.take[0]
        height, count = self.shape[0] // self.runs, rows.stop - rows.start
        for run in range(self.runs):
            first = run * height + rows.start
            take, put = slice(first, first + count), slice(run * count, (run + 1) * count)
            yield replace(self, take=(take,), put=(put,), runs=1)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    pieces: tuple[Piece, ...]
    fused: Piece | None = None
    """The same parameter stored as one tensor, as transformers' in-memory names have it."""
    active_share: Fraction = Fraction(1)
    """How much of it one token multiplies: top_k of all experts, nothing of a looked-up table."""
    unit_columns: bool = False
    """Whether each column is divided by its length over all stored rows."""

    @property
    def count(self) -> int:
        return prod(self.shape)


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    if spec.not_runnable:
        raise ConfigError(f"{spec.family}: {spec.not_runnable}")
    for parameter in _parameters(spec):
        pieces = tuple(
            replace(piece, source=_rename(piece.source, spec.renamed)) for piece in parameter.pieces
        )
        yield replace(parameter, pieces=pieces)


def _parameters(spec: ModelSpec) -> Iterator[Parameter]:
    D = spec.hidden_size
    kind: ParameterKind = "head" if spec.tied_embeddings else "embedding"
    embedding = _divided("model.embed_tokens.weight", (spec.vocab, D), 0, kind=kind)
    yield replace(embedding, active_share=Fraction(int(spec.tied_embeddings)))
    for layer in spec.layers:
        yield from _layer(layer, D, spec.outputs)
    yield _plain("model.norm.weight", (D,), "norm")
    if not spec.tied_embeddings:
        head = _divided("lm_head.weight", (spec.vocab, D), 0, kind="head")
        yield replace(head, unit_columns=spec.norm_head)


def _layer(layer: LayerSpec, D: int, outputs: Span | None) -> Iterator[Parameter]:
    name = f"model.layers.{layer.index}"
    yield _plain(f"{name}.input_layernorm.weight", (D,), "norm")
    if isinstance(layer.mixer, LightningSpec):
        yield from _lightning(layer.mixer, f"{name}.self_attn", D, outputs)
    else:
        assert isinstance(layer.mixer, MLASpec)
        yield from _mla(layer.mixer, f"{name}.self_attn", D, outputs)
    yield _plain(f"{name}.post_attention_layernorm.weight", (D,), "norm")
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, MoESpec):
        yield from _moe(feed_forward, f"{name}.mlp", D, outputs)
    else:
        yield from _mlp(feed_forward.width, f"{name}.mlp", D, outputs)


def _mla(mla: MLASpec, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    H, L, R = mla.heads, mla.kv_lora_rank, mla.qk_rope_head_dim
    query_rows, value_cols = _times(H, mla.qk_head_dim), _times(H, mla.v_head_dim)
    if mla.q_lora_rank is None:
        yield _divided(f"{name}.q_proj.weight", (query_rows, D), 0)
    else:
        yield _plain(f"{name}.q_a_proj.weight", (mla.q_lora_rank, D), "matrix")
        yield _plain(f"{name}.q_a_layernorm.weight", (mla.q_lora_rank,), "norm")
        yield _divided(f"{name}.q_b_proj.weight", (query_rows, mla.q_lora_rank), 0)
    yield _plain(f"{name}.kv_a_proj_with_mqa.weight", (L + R, D), "matrix")
    yield _plain(f"{name}.kv_a_layernorm.weight", (L,), "norm")
    kv_rows = _times(H, mla.qk_nope_head_dim + mla.v_head_dim)
    yield _divided(f"{name}.kv_b_proj.weight", (kv_rows, L), 0)
    yield _output(f"{name}.o_proj.weight", D, value_cols, outputs)
    if mla.indexer is not None and not mla.indexer.shared:
        assert mla.q_lora_rank is not None  # its reader has made sure
        yield from _indexer(mla.indexer, f"{name}.indexer", D, mla.q_lora_rank)


def _indexer(indexer: IndexerSpec, name: str, D: int, q_lora_rank: int) -> Iterator[Parameter]:
    heads, d = indexer.heads, indexer.head_dim
    yield _plain(f"{name}.wq_b.weight", (heads * d, q_lora_rank), "matrix")
    yield _plain(f"{name}.wk.weight", (d, D), "matrix")
    yield _plain(f"{name}.k_norm.weight", (d,), "norm")
    yield _plain(f"{name}.k_norm.bias", (d,), "norm_bias")
    yield _plain(f"{name}.weights_proj.weight", (heads, D), "index_weights")


def _lightning(
    linear: LightningSpec, name: str, D: int, outputs: Span | None
) -> Iterator[Parameter]:
    d = linear.head_dim
    channels = _times(linear.heads, d)
    matrix = f"{name}.query_key_value.weight"
    rows = Piece(matrix, (3 * channels.total, D), (slice(channels.start, channels.stop),), runs=3)
    yield Parameter(matrix, (3 * channels.count, D), "matrix", (rows,))
    if linear.qk_norm:
        yield _plain(f"{name}.query_layernorm.weight", (d,), "norm")
        yield _plain(f"{name}.key_layernorm.weight", (d,), "norm")
    yield _divided(f"{name}.g_proj.weight", (channels, D), 0)
    yield _divided(f"{name}.g_norm.weight", (channels,), 0, kind="norm")
    yield _output(f"{name}.o_proj.weight", D, channels, outputs)


def _mlp(width: Span, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    yield _divided(f"{name}.gate_proj.weight", (width, D), 0)
    yield _divided(f"{name}.up_proj.weight", (width, D), 0)
    yield _output(f"{name}.down_proj.weight", D, width, outputs)


def _moe(moe: MoESpec, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    E, width = moe.experts, moe.expert_width
    yield _plain(f"{name}.gate.weight", (E.total, D), "router")
    if moe.router.correction_bias:
        yield _plain(f"{name}.gate.e_score_correction_bias", (E.total,), "correction_bias")
    projections = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
    here = range(E.start, E.stop)
    taken = (slice(E.start, E.stop),)
    chosen = Fraction(moe.router.top_k, E.total)
    yield Parameter(
        f"{name}.experts.gate_up_proj",
        (E.count, 2 * width, D),
        "matrix",
        tuple(
            Piece(f"{name}.experts.{e}.{part}.weight", (width, D), put=(e - E.start, rows))
            for e in here
            for part, rows in projections
        ),
        Piece(f"{name}.experts.gate_up_proj", (E.total, 2 * width, D), take=taken),
        active_share=chosen,
    )
    yield Parameter(
        f"{name}.experts.down_proj",
        (E.count, D, width),
        "matrix",
        tuple(
            Piece(f"{name}.experts.{e}.down_proj.weight", (D, width), put=(e - E.start,))
            for e in here
        ),
        Piece(f"{name}.experts.down_proj", (E.total, D, width), take=taken),
        active_share=chosen,
    )
    if moe.shared_width:
        yield from _mlp(moe.shared_width, f"{name}.shared_experts", D, outputs)


def _times(span: Span, width: int) -> Span:
    return Span(span.start * width, span.stop * width, span.total * width)


def _plain(name: str, shape: tuple[int, ...], kind: ParameterKind) -> Parameter:
    return Parameter(name, shape, kind, (Piece(name, shape),))


def _divided(
    name: str, dims: tuple[Span | int, ...], dim: int, kind: ParameterKind = "matrix"
) -> Parameter:
    """A tensor of which this rank holds a run of rows (dim 0) or columns (dim 1)."""
    span = dims[dim]
    assert isinstance(span, Span)
    shape = tuple(d.count if isinstance(d, Span) else d for d in dims)
    stored = tuple(d.total if isinstance(d, Span) else d for d in dims)
    take = (slice(None),) * dim + (slice(span.start, span.stop),)
    return Parameter(name, shape, kind, (Piece(name, stored, take=take),))


def _output(name: str, D: int, inner: Span, outputs: Span | None) -> Parameter:
    """Back to the hidden size: a part of every channel's sum, or the whole sum of some channels."""
    if outputs is None:
        return _divided(name, (D, inner), 1)
    return _divided(name, (outputs, inner.total), 0)


# -- names as stored -------------------------------------------------------------------

# Published K2.5 names, the names transformers holds in memory, and those its save_pretrained
# writes (it turns `layers` into `blocks`).
_PREFIXES = {
    "kimi_k25": (
        (re.compile(r"^language_model\.model\.blocks\."), "model.layers."),
        (re.compile(r"^language_model\."), ""),
        (re.compile(r"^model\.language_model\."), "model."),
    )
}
_VISION = re.compile(r"^(model\.)?(vision_tower|mm_projector)\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEXER = re.compile(r"^model\.layers\.(\d+)\.self_attn\.indexer\.")


def _rename(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    return next((name.replace(ours, theirs) for ours, theirs in renamed if ours in name), name)


def published_name(spec: ModelSpec, stored: str) -> str:
    """The name of this table for a name found in a file."""
    for pattern, replacement in _PREFIXES.get(spec.family, ()):
        if pattern.match(stored):
            return pattern.sub(replacement, stored, count=1)
    return stored


def unused_by_choice(spec: ModelSpec, name: str) -> str | None:
    """Why a stored tensor that no parameter takes is no mistake; None if it is one."""
    layer = _LAYER.match(name)
    if layer and spec.num_layers <= int(layer[1]) < spec.num_layers + spec.mtp_layers:
        return "MTP draft layer: speculative decoding is not there yet"
    indexer = _INDEXER.match(name)
    if indexer and int(indexer[1]) in _shared_layers(spec):
        return "indexer of a shared layer: it sees what the last full layer selected"
    if spec.family == "kimi_k25" and _VISION.match(name):
        return "vision tower: image inputs are refused"
    if name.endswith(".rotary_emb.inv_freq"):
        return "rope frequencies: computed from the config"
    return None


def _shared_layers(spec: ModelSpec) -> set[int]:
    return {
        layer.index
        for layer in spec.layers
        if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer and layer.mixer.indexer.shared
    }
