"""Indexers: their facts, and a third opinion on which keys they select.

A wrong common factor changes no selection, so logits cannot show it: scores are held against the
sum they stand for, written out head by head from stored names and keys, and selections against a
sort in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline import reference
from trueline.models import config_file
from trueline.ops.rope import inv_freq
from trueline.reference import config as second_opinion
from trueline.reference import dsa, indexer
from trueline.reference import model as reference_model
from trueline.spec.fields import read_json
from trueline.spec.mixer import MLASpec
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.failed import CheckFailed
from trueline.verify.lightning import Pair

GATE = 1e-12
NORM_EPS = 1e-6


def indexer_facts(mla: MLASpec, config: second_opinion.Config, layer: int) -> Iterator[Pair]:
    ours, theirs, at = mla.indexer, config.indexer, f"layer {layer} indexer "
    yield at + "is there", ours is not None, theirs is not None
    if ours is None or theirs is None:
        return
    yield at + "heads", ours.heads, theirs.index_n_heads
    yield at + "head_dim", ours.head_dim, theirs.index_head_dim
    yield at + "topk", ours.topk, theirs.index_topk
    yield at + "shared", ours.shared, theirs.shared[layer]
    yield at + "scale", ours.scale, indexer.scale(config)
    yield at + "head_weight", ours.head_weight, indexer.head_weight(config)
    yield at + "key_norm_eps", ours.key_norm_eps, dsa.KEY_NORM_EPS
    yield at + "rope.pairing", ours.rope.pairing == "interleaved", theirs.interleaved
    yield at + "rope.inv_freq", inv_freq(ours.rope), second_opinion.inverse_frequencies(config)
    scale = second_opinion.cos_sin_scale(config)
    yield at + "cos_sin_scale", ours.rope.cos_sin_scale, scale
    cached = sum(field.width for field in mla.cache_fields if field.name == "index_key")
    yield at + "cached", cached, 0 if theirs.shared[layer] else theirs.index_head_dim


def index_is_a_sum(subject: Subject) -> None:
    """Every layer's scores equal Σ_h w_h H^-0.5 relu(d^-0.5 q_h·k), and it sees the largest of
    them; of equal ones those at the lowest places."""
    raw = read_json(config_file(subject.model))
    stored = load_file(subject.model / "model.safetensors")
    model = reference.load(subject.model, **subject.facts)
    generator = torch.Generator().manual_seed(7)
    table, _ = model.ropes(subject.positions)
    selections = indexer.Selections()
    wanted: list[list[int]] = []
    for layer in range(raw["num_hidden_layers"]):
        shape = (len(subject.tokens), raw["hidden_size"])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        own = _indexer_weights(stored, layer)
        if own:
            latent = _latent(stored, layer, x)
            exact = index_sum(raw, stored, layer, x, table)
            got = indexer.scores(model.config, model.params, layer, x, latent, table)
            off = float((got - exact).abs().max() / exact.abs().max())
            if not off <= GATE:
                raise CheckFailed(f"index = sum: layer {layer}: scores are {off:.3g} off")
            wanted = [plain_largest(row, t, raw["index_topk"]) for t, row in enumerate(exact)]
        seen = reference_model.seen_keys(model.config, model.params, layer, x, table, selections)
        _compare(f"layer {layer}", selections.made[layer], wanted)
        for t, row in enumerate(wanted):
            if seen[t].nonzero().flatten().tolist() != sorted(place for place in row if place >= 0):
                raise CheckFailed(f"index = sum: layer {layer}: token {t} sees other keys")
    for name, values in ties():
        for topk in (1, 7, len(values), len(values) + 3):
            rows = [plain_largest(row, t, topk) for t, row in enumerate(values)]
            _compare(f"{name}, {topk} of {len(values)}", indexer.largest(values, topk), rows)


def _compare(what: str, got: Tensor, wanted: list[list[int]]) -> None:
    for t, (ours, row) in enumerate(zip(got.tolist(), wanted, strict=True)):
        if ours != row:
            raise CheckFailed(f"index = sum: {what}: token {t}: {ours} selected, not {row}")


def plain_largest(scores: Tensor, t: int, topk: int) -> list[int]:
    values = scores.tolist()
    best = sorted(range(t + 1), key=lambda s: (-values[s], s))[:topk]
    return best + [-1] * (topk - len(best))


def ties() -> Iterator[tuple[str, Tensor]]:
    """What relu makes of few heads: rows of zeros, and others."""
    generator = torch.Generator().manual_seed(3)
    yield "all equal", torch.zeros(23, 23, dtype=torch.float64)
    few = torch.randint(-1, 3, (29, 29), generator=generator)
    yield "four values", few.double()
    yield "zeros of both signs", torch.where(few > 0, 0.0, -0.0).double()


def index_sum(
    raw: JSON,
    weights: Mapping[str, Tensor],
    layer: int,
    x: Tensor,
    table: tuple[Tensor, Tensor],
) -> Tensor:
    """Scores of a layer, of weights under published names, for inputs x."""
    return _sum(raw, _indexer_weights(weights, layer), x, _latent(weights, layer, x), table)


def _indexer_weights(stored: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    start = f"model.layers.{layer}.self_attn.indexer."
    return {
        name.removeprefix(start): value.double()
        for name, value in stored.items()
        if name.startswith(start)
    }


def _latent(stored: Mapping[str, Tensor], layer: int, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.self_attn.q_a"
    q = x @ stored[f"{at}_proj.weight"].double().T
    unit = q / (q.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()
    return unit * stored[f"{at}_layernorm.weight"].double()


def _sum(
    raw: JSON,
    w: Mapping[str, Tensor],
    x: Tensor,
    latent: Tensor,
    table: tuple[Tensor, Tensor],
) -> Tensor:
    heads, d = raw["index_n_heads"], raw["index_head_dim"]
    k = x @ w["wk.weight"].T
    variance, mean = torch.var_mean(k, -1, correction=0, keepdim=True)
    k = (k - mean) / (variance + NORM_EPS).sqrt() * w["k_norm.weight"] + w["k_norm.bias"]
    k = _rotated(raw, k, table)
    total = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    for head in range(heads):
        q = _rotated(raw, latent @ w["wq_b.weight"][head * d : (head + 1) * d].T, table)
        weight = x @ w["weights_proj.weight"][head] / math.sqrt(heads)
        total += weight[:, None] * (q @ k.T / math.sqrt(d)).clamp_min(0)
    return total


def _rotated(raw: JSON, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """The first channels as complex numbers, by a table that the oracle holds to be right."""
    rotation, width = torch.complex(*table), raw["qk_rope_head_dim"]
    interleaved = raw.get("indexer_rope_interleave", raw["model_type"] == "glm_moe_dsa")
    even = slice(0, width, 2) if interleaved else slice(0, width // 2)
    odd = slice(1, width, 2) if interleaved else slice(width // 2, width)
    rotated, out = torch.complex(x[:, even], x[:, odd]) * rotation, x.clone()
    out[:, even], out[:, odd] = rotated.real, rotated.imag
    return out
