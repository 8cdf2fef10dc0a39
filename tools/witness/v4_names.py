"""DeepSeek V4's weights under their published names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from trueline.reference import v4_facts

if TYPE_CHECKING:
    from witness.v4 import V4, Compressed, Compressor, V4Experts

EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def published(model: V4) -> Iterator[tuple[str, Tensor]]:
    yield "embed.weight", model.embed_tokens.weight
    yield "norm.weight", model.norm.weight
    yield "head.weight", model.lm_head.weight
    for name, tensor in model.hc_head.named_parameters():
        yield f"hc_head_{name}", tensor
    for number, layer in enumerate(model.layers):
        at = f"layers.{number}"
        for kind in ("attn", "ffn"):
            connection = layer.get_submodule(f"hc_{kind}")
            yield f"{at}.{kind}_norm.weight", connection.norm.weight
            for name in ("fn", "base", "scale"):
                yield f"{at}.hc_{kind}_{name}", getattr(connection, name)
        yield from published_attention(f"{at}.attn", layer.attention)
        yield from published_experts(f"{at}.ffn", layer.mlp)


def published_attention(at: str, attention: Compressed) -> Iterator[tuple[str, Tensor]]:
    yield f"{at}.attn_sink", attention.sinks
    yield f"{at}.wo_a.weight", attention.o_a_proj.flatten(0, 1)
    yield f"{at}.wo_b.weight", attention.o_b_proj.weight
    yield f"{at}.wq_a.weight", attention.q_a_proj.weight
    yield f"{at}.q_norm.weight", attention.q_a_layernorm.weight
    yield f"{at}.wq_b.weight", attention.q_b_proj.weight
    yield f"{at}.wkv.weight", attention.kv_proj.weight
    yield f"{at}.kv_norm.weight", attention.kv_norm.weight
    if attention.form != v4_facts.WINDOW:
        yield from published_compressor(f"{at}.compressor", attention.compressor)
    if attention.indexer is not None:
        yield f"{at}.indexer.wq_b.weight", attention.indexer.q_b_proj.weight
        yield f"{at}.indexer.weights_proj.weight", attention.indexer.weights_proj.weight
        yield from published_compressor(f"{at}.indexer.compressor", attention.indexer.compressor)


def published_compressor(at: str, compressor: Compressor) -> Iterator[tuple[str, Tensor]]:
    yield f"{at}.wkv.weight", compressor.kv_proj.weight
    yield f"{at}.wgate.weight", compressor.gate_proj.weight
    yield f"{at}.ape", compressor.position_bias
    yield f"{at}.norm.weight", compressor.norm.weight


def published_experts(at: str, experts: V4Experts) -> Iterator[tuple[str, Tensor]]:
    yield f"{at}.gate.weight", experts.gate.weight
    if experts.hashed:
        yield f"{at}.gate.tid2eid", experts.table
    else:
        yield f"{at}.gate.bias", experts.bias
    for name, ours in EXPERT_NAMES.items():
        stacked = getattr(experts, ours)
        for expert in range(experts.count):
            yield f"{at}.experts.{expert}.{name}.weight", stacked[expert]
        yield f"{at}.shared_experts.{name}.weight", stacked[-1]
