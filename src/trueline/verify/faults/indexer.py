"""Mistakes in the facts, weights and definition of indexers. A wrong selection shows in the logits,
so transformers catches it; a wrong factor shows in the scores only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from trueline.models import deepseek
from trueline.models import indexer as index_reader
from trueline.models import parameters as parameter_table
from trueline.reference import config as reference_config
from trueline.reference import dsa, indexer
from trueline.reference import model as reference_model
from trueline.reference import weights as reference_weights
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rotate_half_split,
    rotate_interleaved,
    top_k,
)
from trueline.reference.indexer import Selections
from trueline.spec import mixer, rope
from trueline.spec.fields import Fields
from trueline.spec.model import ModelSpec
from trueline.spec.source import Fact, formula
from trueline.verify.faults import Fault, Make, Rewriting
from trueline.weights import ledger as ledger_module
from trueline.weights import load
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats import Stored
from trueline.weights.formats.block_fp8 import BlockFp8
from trueline.weights.formats.dense import DenseStored


def _index_facts(**wrong: object) -> Make:
    guessed = {name: formula(value, "guessed") for name, value in wrong.items()}
    return lambda original: Rewriting(original, **guessed)


def _scaled(factor: Callable[[mixer.IndexerSpec], float]) -> Make:
    """A derived number of the spec times something."""
    return lambda original: property(lambda spec: original.__get__(spec) * factor(spec))


def _pairing(word: str) -> Make:
    """Whatever the file or the family says."""

    def broken(fields: Fields, own: object, family: str) -> Fact[str]:
        fields.ignore("indexer_rope_interleave")
        return formula(word, "guessed")

    return lambda _: broken


def _shifted(original: Make) -> Make:
    """Layers of a pattern counted from one."""

    def broken(fields: object, num_layers: int) -> object:
        shared = original(fields, num_layers)
        return replace(shared, value=(False, *shared.value[:-1]))

    return broken


def _all_full(_: Make) -> Make:
    def broken(fields: Fields, own: object, num_layers: int) -> Fact[tuple[bool, ...]]:
        fields.ignore("index_topk_freq", "index_skip_topk_offset")
        return formula((False,) * num_layers, "guessed")

    return broken


def _spec_mscale(spec: mixer.IndexerSpec) -> float:
    yarn = spec.rope.yarn
    assert yarn is not None
    return rope.yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2


def _mscale(config: Config) -> float:
    yarn = config.yarn
    assert yarn is not None
    return float(reference_config.mscale(yarn.factor, yarn.mscale_all_dim) ** 2)


def _no_relu(_: Make) -> Make:
    def broken(
        config: Config, params: Params, layer: int, x: Tensor, q_latent: Tensor, rope: Pair
    ) -> Tensor:
        at = f"model.layers.{layer}.self_attn.indexer"
        q = indexer.queries(config, params, at, q_latent, rope)
        k = indexer.keys(config, params, at, x, rope)
        per_head = q @ k.T * indexer.scale(config)
        weights = indexer.head_weights(config, params, at, x)
        return (weights[:, :, None] * per_head).sum(1)

    return broken


def _coarse_scores(original: Make) -> Make:
    return lambda *arguments: original(*arguments).bfloat16().double()


def _recomputed(_: Make) -> Make:
    """A shared layer runs the last full layer's indexer on its own input."""

    def broken(
        config: Config,
        params: Params,
        layer: int,
        x: Tensor,
        q: Tensor,
        rope: Pair,
        selections: Selections,
    ) -> Tensor:
        owner = layer
        while config.indexer_facts.shared[owner]:
            owner -= 1
        values = indexer.scores(config, params, owner, x, q, rope)
        chosen = indexer.largest(values, config.indexer_facts.index_topk)
        selections.made[layer] = chosen
        return chosen

    return broken


def _shared_is_dense(original: Make) -> Make:
    def broken(config: Config, params: Params, layer: int, x: Tensor, *rest: object) -> Tensor:
        seen: Tensor = original(config, params, layer, x, *rest)
        shared = config.indexer is not None and config.indexer.shared[layer]
        return reference_model.visible(len(x)) if shared else seen

    return broken


def _raw_latent(original: Make) -> Make:
    def broken(
        config: Config, params: Params, layer: int, x: Tensor, _: Tensor, *rest: object
    ) -> object:
        raw = linear(params, f"model.layers.{layer}.self_attn.q_a_proj", x)
        return original(config, params, layer, x, raw, *rest)

    return broken


def _later_keys(_: Make) -> Make:
    """Scores of keys that come later are not taken out before the choice."""

    def broken(values: Tensor, topk: int) -> Tensor:
        place = torch.arange(len(values))[:, None]
        best = top_k(values, min(topk, len(values)))
        best = best.masked_fill(best > place, indexer.NOTHING)
        return torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=indexer.NOTHING)

    return broken


def _no_bias(original: Make) -> Make:
    def broken(*arguments: object) -> Iterator[object]:
        return (p for p in original(*arguments) if not p.name.endswith("k_norm.bias"))

    return broken


def _spare_taken_for_wrong(original: Make) -> Make:
    return lambda spec, name: None if ".indexer." in name else original(spec, name)


class _ScalesByHead(BlockFp8):
    """Each head of kv_b_proj gets a run of scale rows, as if blocks ended where heads do."""

    height: ClassVar[int]

    def open(self, tensors: Sequence[StoredTensor], values: Sequence[Tensor]) -> DenseStored:
        stored, scale = values[0].float(), values[1]
        each = len(scale) * self.height // len(stored)
        row = torch.arange(len(stored))
        inside = (row % self.height // self.block[0]).clamp_max(each - 1)
        at = row // self.height * each + inside
        across = torch.arange(stored.shape[1]) // self.block[1]
        return DenseStored(stored * scale[at][:, across])

    def check(self, tensors: Sequence[StoredTensor], stored: Stored) -> None:
        """Numbers and scales are one already."""


def _scales_by_head(original: Make) -> Make:
    def broken(checkpoint: object, spec: ModelSpec, *only: object) -> list[object]:
        mla, facts = spec.layers[0].mixer, vars(spec.storage)
        assert isinstance(mla, mixer.MLASpec)
        _ScalesByHead.height = mla.qk_nope_head_dim + mla.v_head_dim
        return [
            replace(each, use=replace(each.use, format=_ScalesByHead(**facts)))
            if each.parameter.name.endswith("kv_b_proj.weight")
            else each
            for each in original(checkpoint, spec, *only)
        ]

    return broken


_SPEC, _IS = mixer.IndexerSpec, "index = sum"

INDEXER_FAULTS = [
    Fault("index-spec-interleaved", "V3.2's indexer interleaved, as its attention", "one-spec",
          "v32", index_reader, "read_pairing", _pairing("interleaved")),
    Fault("index-spec-half-split", "GLM-5's indexer half-split: indexer_rope_interleave not read",
          "one-spec", "glm5", index_reader, "read_pairing", _pairing("half-split")),
    Fault("index-spec-default", "GLM-5 without the key half-split", "one-spec", "glm5-saved",
          index_reader, "read_pairing",
          lambda original: lambda fields, own, family: original(
              fields, replace(own, interleaved=False), family)),
    Fault("index-interleaved", "the reference's V3.2 indexer interleaved", "oracle", "v32",
          indexer, "rotate_half_split", lambda _: rotate_interleaved),
    Fault("index-half-split", "the reference's GLM-5 indexer half-split", "oracle", "glm5",
          indexer, "rotate_interleaved", lambda _: rotate_half_split),
    Fault("index-rotation-last", "the last channels of index heads rotate", "oracle", "v32",
          indexer, "rotate_first",
          lambda original: lambda config, x, rope: original(config, x.flip(-1), rope).flip(-1)),
    Fault("index-unrotated", "index queries and keys do not rotate", "oracle", "glm5-far",
          indexer, "rotate_first", lambda _: lambda config, x, rope: x),
    Fault("index-spec-width", "whole index heads rotate", "one-spec", "v32",
          index_reader, "index_rope",
          lambda original: lambda rope, pairing: replace(original(rope, pairing), dim=32)),
    Fault("index-key-bias", "the bias of the key norm is dropped", "oracle", "v32",
          indexer, "layer_norm",
          lambda original: lambda x, weight, bias: original(x, weight, 0 * bias)),
    Fault("index-key-bias-unloaded", "the bias of the key norm is not loaded", "ledger", "glm5",
          parameter_table, "_indexer", _no_bias),
    Fault("index-spec-eps", "the key norm takes rms_norm_eps", "one-spec", "glm5",
          index_reader, "IndexerSpec", _index_facts(key_norm_eps=1e-5)),
    Fault("index-eps", "the reference's key norm takes rms_norm_eps", _IS, "glm5",
          dsa, "KEY_NORM_EPS", lambda _: 1e-5),
    Fault("index-spec-mscale", "YaRN's mscale² in the index scale", "one-spec", "v32",
          _SPEC, "scale", _scaled(_spec_mscale)),
    Fault("index-mscale", "mscale² in the reference's index scale", _IS, "v32",
          indexer, "scale", lambda original: lambda config: original(config) * _mscale(config)),
    Fault("index-spec-head-weight", "head weights without heads^-0.5", "one-spec", "glm5",
          _SPEC, "head_weight", _scaled(lambda spec: spec.heads**0.5)),
    Fault("index-head-weight", "the reference's head weights without heads^-0.5", _IS, "glm5",
          indexer, "head_weight", lambda _: lambda config: 1.0),
    Fault("index-no-relu", "scores without relu", "oracle", "v32", indexer, "scores", _no_relu),
    Fault("index-raw-latent", "index queries from the latent before its norm", "oracle", "v32",
          indexer, "select", _raw_latent),
    Fault("index-ignored", "selection is ignored: every key is seen", "oracle", "v32",
          indexer, "kept",
          lambda _: lambda chosen, count: torch.ones(count, count, dtype=torch.bool)),
    Fault("index-later-keys", "keys that come later take places in the selection", "oracle", "v32",
          indexer, "largest", _later_keys),
    Fault("index-spec-topk", "one key too many", "one-spec", "v32",
          index_reader, "IndexerSpec", _index_facts(topk=25)),
    Fault("index-topk", "one key too few", "oracle", "glm5",
          indexer, "largest",
          lambda original: lambda values, topk: original(values, topk - 1)),
    Fault("index-ties", "of equal scores the highest place wins", _IS, "v32-ties",
          indexer, "top_k",
          lambda original: lambda x, k: x.shape[-1] - 1 - original(x.flip(-1), k)),
    Fault("index-fill", "a short row is filled up with 0", _IS, "v32",
          indexer, "NOTHING", lambda _: 0),
    Fault("index-spec-all-full", "GLM-5's shared layers want indexers of their own", "ledger",
          "glm5", deepseek, "read_shared_layers", _all_full),
    Fault("index-recomputed", "a shared layer selects anew", "oracle", "glm5",
          indexer, "select", _recomputed),
    Fault("index-shared-dense", "a shared layer sees every key", "oracle", "glm5",
          reference_model, "seen_keys", _shared_is_dense),
    Fault("index-spec-pattern", "index_topk_pattern read from the second letter on", "one-spec",
          "glm5-pattern", index_reader, "_pattern", _shifted),
    Fault("index-pattern", "the reference reads it so", "one-spec", "glm5-pattern",
          dsa, "index_kinds",
          lambda original: lambda raw: ["full", *original(raw)[:-1]]),
    Fault("index-spec-offset", "index_topk_freq counted from layer 0", "one-spec", "glm5",
          index_reader, "_frequency",
          lambda original: lambda fields, layers: replace(original(fields, layers), value=tuple(
              layer % fields.raw["index_topk_freq"] != 0 for layer in range(layers)))),
    Fault("index-weights-bf16", "weights_proj is rounded to bfloat16", "ledger", "v32-bf16",
          load, "FLOAT32_KINDS",
          lambda original: tuple(kind for kind in original if kind != "index_weights")),
    Fault("index-scores-bf16", "index scores in bfloat16", "oracle", "v32",
          indexer, "scores", _coarse_scores),
    Fault("index-spare-refused", "stored indexers of shared layers are not dropped", "ledger",
          "glm5-spare", ledger_module, "unused_by_choice", _spare_taken_for_wrong),
    Fault("index-spare-known", "the reference takes them for the layer's own", "ledger",
          "glm5-spare", reference_weights, "is_foreign", lambda _: lambda name, config: False),
    Fault("kv-b-scales-by-head", "scale rows of kv_b_proj split per head", "ledger", "glm5-fp8",
          load, "wanted_pieces", _scales_by_head),
]  # fmt: skip
