"""Facts of a whole model, and those of DeepSeek-V4's layers: what the engine reads in config.json
beside what the reference reads there for itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trueline.models import config_file
from trueline.ops.rope import inv_freq
from trueline.reference import compressor, v4_facts
from trueline.reference import config as second_opinion
from trueline.reference.config import Config
from trueline.spec.feedforward import MoESpec
from trueline.spec.fields import read_json
from trueline.spec.mixer import CompressedSpec, CompressorSpec, EntryIndexerSpec
from trueline.spec.model import LayerSpec, ModelSpec
from trueline.verify.lightning import Pair
from trueline.weights.formats import Storage
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.fp4 import Fp4Experts
from trueline.weights.formats.pack_int4 import PackInt4


def model_facts(spec: ModelSpec, config: Config) -> Iterator[Pair]:
    yield "layers", spec.num_layers, config.num_hidden_layers
    yield "hidden_size", spec.hidden_size, config.hidden_size
    yield "vocab", spec.vocab.total, config.vocab_size
    yield "norm_eps", spec.norm_eps, config.rms_norm_eps
    yield "tied_embeddings", spec.tied_embeddings, config.tie_word_embeddings
    yield "norm_head", spec.norm_head, config.norm_head
    yield from _storage_facts(spec, config)


def _storage_facts(spec: ModelSpec, config: Config) -> Iterator[Pair]:
    formats = spec.storage.formats if isinstance(spec.storage, Storage) else ()
    blocks = [fmt.block for fmt in formats if isinstance(fmt, BlockFp8)]
    groups = [fmt.group for fmt in formats if isinstance(fmt, PackInt4)]
    theirs = config.quantised
    yield "fp8 block", blocks, [theirs.fp8_block] if theirs.fp8_block else []
    yield "int4 group", groups, [theirs.int4_group] if theirs.int4_group else []
    yield "fp4 experts", isinstance(spec.storage, Fp4Experts), theirs.fp4_experts


def facts_of_v4(spec: ModelSpec, config: Config, model: Path) -> Iterator[Pair]:
    v4 = config.v4_facts
    yield from model_facts(spec, config)
    streams = spec.hyper_connections
    yield "hyper-connections", streams is not None, True
    if streams is not None:
        yield "streams", streams.streams, v4.hc_mult
        yield "Sinkhorn's iterations", streams.iterations, v4.hc_sinkhorn_iters
        yield "hc_eps", streams.eps, v4.hc_eps
    raw = read_json(config_file(model))
    for layer in spec.layers:
        at = f"layer {layer.index} "
        mixer, moe = layer.mixer, layer.feed_forward
        assert isinstance(mixer, CompressedSpec)
        assert isinstance(moe, MoESpec)
        ropes = second_opinion.v4_layer_rope(raw, layer.index)
        for name, ours, theirs in (
            ("rope.inv_freq", inv_freq(mixer.rope), ropes[0]),
            ("cos_sin_scale", mixer.rope.cos_sin_scale, ropes[1]),
            ("softmax_scale", mixer.softmax_scale, ropes[2]),
            *_mixer_facts(mixer, config, layer),
            *_expert_facts(moe, config, layer),
        ):
            yield at + name, ours, theirs


def _mixer_facts(mixer: CompressedSpec, config: Config, layer: LayerSpec) -> Iterator[Pair]:
    v4 = config.v4_facts
    yield "form", mixer.form, v4.forms[layer.index]
    yield "heads", mixer.heads.total, config.num_attention_heads
    yield "head_dim", mixer.head_dim, v4.head_dim
    yield "window", mixer.window, v4.sliding_window
    yield "q_lora_rank", mixer.q_lora_rank, config.q_lora_rank
    yield "o_groups", mixer.o_groups.total, v4.o_groups
    yield "o_lora_rank", mixer.o_lora_rank, v4.o_lora_rank
    yield "norms' eps", mixer.norm_eps, config.rms_norm_eps
    yield "rope.pairing", mixer.rope.pairing, "interleaved"
    sparse = v4.forms[layer.index] == v4_facts.SPARSE
    yield from _pool_facts("entries", mixer.compressor, v4.ratios[layer.index], v4.head_dim, sparse)
    yield "indexer", mixer.indexer is not None, sparse
    if mixer.indexer is not None:
        yield from _indexer_facts(mixer.indexer, config, v4.ratios[layer.index])


def _indexer_facts(indexer: EntryIndexerSpec, config: Config, ratio: int) -> Iterator[Pair]:
    v4 = config.v4_facts
    yield "index heads", indexer.heads, v4.index_n_heads
    yield "index head_dim", indexer.head_dim, v4.index_head_dim
    yield "index topk", indexer.topk, v4.index_topk
    yield "index scale", indexer.scale, compressor.scale(config)
    yield "index head_weight", indexer.head_weight, compressor.head_weight(config)
    yield from _pool_facts("index entries", indexer.compressor, ratio, v4.index_head_dim, True)


def _pool_facts(
    what: str, pool: CompressorSpec | None, ratio: int, dim: int, overlap: bool
) -> Iterator[Pair]:
    yield f"ratio of {what}", pool.ratio if pool else 0, ratio
    if pool is not None:
        yield f"width of {what}", pool.dim, dim
        yield f"overlap of {what}", pool.overlap, overlap


def _expert_facts(moe: MoESpec, config: Config, layer: LayerSpec) -> Iterator[Pair]:
    router, hashed = moe.router, config.v4_facts.hashed[layer.index]
    shared = moe.shared_width.total if moe.shared_width else 0
    yield "experts", moe.experts.total, config.n_routed_experts
    yield "shared width", shared, config.n_shared_experts * config.shared_expert_width
    yield "swiglu_limit", moe.swiglu_limit, config.v4_facts.swiglu_limit
    yield "scoring", router.scoring, config.scoring_func
    yield "groups", router.num_groups, config.n_group
    yield "top_k", router.top_k, config.num_experts_per_tok
    yield "renormalise", router.renormalise, config.norm_topk_prob
    yield "scaling_factor", router.scaling_factor, config.routed_scaling_factor
    yield "hashed", router.hashed, hashed
    yield "correction_bias", router.correction_bias, not hashed
