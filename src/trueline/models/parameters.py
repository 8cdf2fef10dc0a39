"""Every parameter of a model, its shape on this rank, and the checkpoint tensors that fill it.

One table serves the ledger, the loader, the parameter counts and `make-tiny`. A parameter has the
same name in every family, the one that most of them publish; its pieces have the names of the
family's own files. The experts of a layer are one stacked parameter, under the name that
transformers gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import (
    CompressedSpec,
    CompressorSpec,
    IndexerSpec,
    LightningSpec,
    MixerSpec,
    MLASpec,
)
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.spec.parameters import Parameter, ParameterKind, Piece, divided, output, plain, times
from trueline.spec.source import Span


def parameters(spec: ModelSpec) -> Iterator[Parameter]:
    if not spec.renamed:
        yield from _parameters(spec)
        return

    def as_stored(piece: Piece) -> Piece:
        return replace(piece, source=_rename(piece.source, spec.renamed))

    for parameter in _parameters(spec):
        yield replace(
            parameter,
            pieces=tuple(map(as_stored, parameter.pieces)),
            fused=as_stored(parameter.fused) if parameter.fused else None,
        )


def _parameters(spec: ModelSpec) -> Iterator[Parameter]:
    D = spec.hidden_size
    kind: ParameterKind = "head" if spec.tied_embeddings else "embedding"
    embedding = divided("model.embed_tokens.weight", (spec.vocab, D), 0, kind=kind)
    yield replace(embedding, active_share=Fraction(int(spec.tied_embeddings)))
    streams = spec.hyper_connections.streams if spec.hyper_connections else None
    for layer in spec.layers:
        yield from _layer(layer, spec, streams)
    if streams:
        yield from _hyper_connections("model.hc_head", streams, D, outputs=streams, scales=1)
    yield plain("model.norm.weight", (D,), "norm")
    if not spec.tied_embeddings:
        head = divided("lm_head.weight", (spec.vocab, D), 0, kind="head")
        yield replace(head, unit_columns=spec.norm_head)


def _layer(layer: LayerSpec, spec: ModelSpec, streams: int | None) -> Iterator[Parameter]:
    name, D, outputs = f"model.layers.{layer.index}", spec.hidden_size, spec.outputs
    if streams:  # before, after, and from each stream to each
        mixed = (2 + streams) * streams
        for part in ("hc_attn", "hc_ffn"):
            yield from _hyper_connections(f"{name}.{part}", streams, D, outputs=mixed, scales=3)
    yield plain(f"{name}.input_layernorm.weight", (D,), "norm")
    yield from _mixer(layer.mixer, f"{name}.self_attn", D, outputs)
    yield plain(f"{name}.post_attention_layernorm.weight", (D,), "norm")
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, MoESpec):
        yield from _moe(feed_forward, f"{name}.mlp", spec)
    else:
        yield from _mlp(feed_forward.width, f"{name}.mlp", D, outputs)


def _hyper_connections(
    name: str, streams: int, D: int, *, outputs: int, scales: int
) -> Iterator[Parameter]:
    yield plain(f"{name}.fn", (outputs, streams * D), "hc_fn")
    yield plain(f"{name}.base", (outputs,), "hc_base")
    yield plain(f"{name}.scale", (scales,), "hc_scale")


def _mixer(mixer: MixerSpec, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    if isinstance(mixer, MLASpec):
        return _mla(mixer, name, D, outputs)
    if isinstance(mixer, LightningSpec):
        return _lightning(mixer, name, D, outputs)
    if isinstance(mixer, CompressedSpec):
        return _compressed(mixer, name, D, outputs)
    return mixer.parameters(name, D, outputs)  # of another package


def _mla(mla: MLASpec, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    H, L, R = mla.heads, mla.kv_lora_rank, mla.qk_rope_head_dim
    query_rows, value_cols = times(H, mla.qk_head_dim), times(H, mla.v_head_dim)
    if mla.q_lora_rank is None:
        yield divided(f"{name}.q_proj.weight", (query_rows, D), 0)
    else:
        yield plain(f"{name}.q_a_proj.weight", (mla.q_lora_rank, D), "matrix")
        yield plain(f"{name}.q_a_layernorm.weight", (mla.q_lora_rank,), "norm")
        yield divided(f"{name}.q_b_proj.weight", (query_rows, mla.q_lora_rank), 0)
    yield plain(f"{name}.kv_a_proj_with_mqa.weight", (L + R, D), "matrix")
    yield plain(f"{name}.kv_a_layernorm.weight", (L,), "norm")
    kv_rows = times(H, mla.qk_nope_head_dim + mla.v_head_dim)
    yield divided(f"{name}.kv_b_proj.weight", (kv_rows, L), 0)
    yield output(f"{name}.o_proj.weight", D, value_cols, outputs)
    if mla.indexer is not None and not mla.indexer.shared:
        assert mla.q_lora_rank is not None  # its reader has made sure
        yield from _indexer(mla.indexer, f"{name}.indexer", D, mla.q_lora_rank)


def _indexer(indexer: IndexerSpec, name: str, D: int, q_lora_rank: int) -> Iterator[Parameter]:
    heads, d = indexer.heads, indexer.head_dim
    yield plain(f"{name}.wq_b.weight", (heads * d, q_lora_rank), "matrix")
    yield plain(f"{name}.wk.weight", (d, D), "matrix")
    yield plain(f"{name}.k_norm.weight", (d,), "norm")
    yield plain(f"{name}.k_norm.bias", (d,), "norm_bias")
    yield plain(f"{name}.weights_proj.weight", (heads, D), "index_weights")


def _lightning(
    linear: LightningSpec, name: str, D: int, outputs: Span | None
) -> Iterator[Parameter]:
    d = linear.head_dim
    channels = times(linear.heads, d)
    matrix = f"{name}.query_key_value.weight"
    rows = Piece(matrix, (3 * channels.total, D), (slice(channels.start, channels.stop),), runs=3)
    yield Parameter(matrix, (3 * channels.count, D), "matrix", (rows,))
    if linear.qk_norm:
        yield plain(f"{name}.query_layernorm.weight", (d,), "norm")
        yield plain(f"{name}.key_layernorm.weight", (d,), "norm")
    yield divided(f"{name}.g_proj.weight", (channels, D), 0)
    yield divided(f"{name}.g_norm.weight", (channels,), 0, kind="norm")
    yield output(f"{name}.o_proj.weight", D, channels, outputs)


def _compressed(
    mixer: CompressedSpec, name: str, D: int, outputs: Span | None
) -> Iterator[Parameter]:
    H, d, Q, G = mixer.heads, mixer.head_dim, mixer.q_lora_rank, mixer.o_groups
    group_rows, group_width = times(G, mixer.o_lora_rank), H.total // G.total * d
    yield plain(f"{name}.q_a_proj.weight", (Q, D), "matrix")
    yield plain(f"{name}.q_a_layernorm.weight", (Q,), "norm")
    yield divided(f"{name}.q_b_proj.weight", (times(H, d), Q), 0)
    yield plain(f"{name}.kv_proj.weight", (d, D), "matrix")
    yield plain(f"{name}.kv_norm.weight", (d,), "norm")
    yield divided(f"{name}.sinks", (H,), 0, kind="sinks")
    yield divided(f"{name}.o_a_proj.weight", (group_rows, group_width), 0)
    yield output(f"{name}.o_b_proj.weight", D, group_rows, outputs)
    if mixer.compressor is not None:
        yield from _compressor(mixer.compressor, f"{name}.compressor", D)
    if mixer.indexer is not None:
        heads, at = mixer.indexer.heads, f"{name}.indexer"
        yield plain(f"{at}.q_b_proj.weight", (heads * mixer.indexer.head_dim, Q), "matrix")
        yield plain(f"{at}.weights_proj.weight", (heads, D), "index_weights")
        yield from _compressor(mixer.indexer.compressor, f"{at}.compressor", D)


def _compressor(compressor: CompressorSpec, name: str, D: int) -> Iterator[Parameter]:
    width = compressor.width
    yield plain(f"{name}.kv_proj.weight", (width, D), "compressor")
    yield plain(f"{name}.gate_proj.weight", (width, D), "compressor")
    yield plain(f"{name}.position_bias", (compressor.ratio, width), "position_bias")
    yield plain(f"{name}.norm.weight", (compressor.dim,), "norm")


def _mlp(width: Span, name: str, D: int, outputs: Span | None) -> Iterator[Parameter]:
    yield divided(f"{name}.gate_proj.weight", (width, D), 0)
    yield divided(f"{name}.up_proj.weight", (width, D), 0)
    yield output(f"{name}.down_proj.weight", D, width, outputs)


def _moe(moe: MoESpec, name: str, spec: ModelSpec) -> Iterator[Parameter]:
    D, outputs = spec.hidden_size, spec.outputs
    yield from _router(moe, f"{name}.gate", D, spec.vocab.total)
    E, W = moe.experts, moe.expert_width
    width, rows = W.count, slice(W.start, W.stop)
    projections = (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width)))
    here = range(E.start, E.stop)
    taken = slice(E.start, E.stop)
    chosen = Fraction(moe.router.top_k, E.total)
    yield Parameter(
        f"{name}.experts.gate_up_proj",
        (E.count, 2 * width, D),
        "matrix",
        tuple(
            Piece(f"{name}.experts.{e}.{part}.weight", (W.total, D), (rows,), (e - E.start, put))
            for e in here
            for part, put in projections
        ),
        Piece(f"{name}.experts.gate_up_proj", (E.total, 2 * W.total, D), (taken, rows), runs=2),
        active_share=chosen,
    )
    each = output(f"{name}.experts.down_proj", D, W, outputs)
    (piece,) = each.pieces
    yield Parameter(
        each.name,
        (E.count, *each.shape),
        "matrix",
        tuple(
            replace(piece, source=f"{name}.experts.{e}.down_proj.weight", put=(e - E.start,))
            for e in here
        ),
        Piece(each.name, (E.total, *piece.shape), take=(taken, *piece.take)),
        active_share=chosen,
    )
    if moe.shared_width:
        yield from _mlp(moe.shared_width, f"{name}.shared_experts", D, outputs)


def _router(moe: MoESpec, name: str, D: int, vocab: int) -> Iterator[Parameter]:
    router, E = moe.router, moe.experts.total
    yield plain(f"{name}.weight", (E, D), "router")
    if router.correction_bias:
        yield plain(f"{name}.e_score_correction_bias", (E,), "correction_bias")
    if router.hashed:
        table = plain(f"{name}.tid2eid", (vocab, router.top_k), "expert_ids")
        yield replace(table, below=E, active_share=Fraction(0))


# -- names as stored -------------------------------------------------------------------

# Each in turn. Published K2.5 names, the names transformers holds in memory, and those its
# save_pretrained writes (it turns `layers` into `blocks`). V4: what in those differs from published
# names and from ours.
_SPELLINGS = {
    "kimi_k25": (
        (re.compile(r"^language_model\.model\.blocks\."), "model.layers."),
        (re.compile(r"^language_model\."), ""),
        (re.compile(r"^model\.language_model\."), "model."),
    ),
    "deepseek_v4": (
        (re.compile(r"^model\."), ""),
        (re.compile(r"^embed_tokens\."), "embed."),
        (re.compile(r"^hc_head\.hc_"), "hc_head_"),
        (re.compile(r"\.(attn|ffn)_hc\."), r".hc_\1_"),
        (re.compile(r"\.compressor\.indexer\.(?:scorer\.|(?=q_b_proj\.))"), ".indexer."),
        (re.compile(r"\.compressor\.indexer\."), ".indexer.compressor."),
        (re.compile(r"\.compressor\.kv_norm\."), ".compressor.norm."),
        (re.compile(r"\.q_a_norm\."), ".q_norm."),
        (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
    ),
}
_HELD_AS_OURS = ("deepseek_v4",)
"""Families of which transformers holds the other names as we do: not as published."""
_DRAFT = "MTP draft layer: speculative decoding is not there yet"
_VISION = re.compile(r"^(model\.)?(vision_tower|mm_projector)\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEXER = re.compile(r"^model\.layers\.(\d+)\.self_attn\.indexer\.")


def _rename(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in renamed:
        name = name.replace(ours, theirs)
    return name


def published_name(spec: ModelSpec, stored: str) -> str:
    """The name of this table for a name found in a file."""
    for pattern, replacement in _SPELLINGS.get(spec.family, ()):
        stored = pattern.sub(replacement, stored, count=1)
    return _rename(stored, spec.renamed) if spec.family in _HELD_AS_OURS else stored


def unused_by_choice(spec: ModelSpec, name: str) -> str | None:
    """Why a stored tensor that no parameter takes is no mistake; None if it is one."""
    layer = _LAYER.match(name)
    if layer and spec.num_layers <= int(layer[1]) < spec.num_layers + spec.mtp_layers:
        return _DRAFT
    if spec.family == "deepseek_v4" and name.startswith("mtp."):
        return _DRAFT
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
