"""Readers for the indexer of sparse latent attention (DeepSeek-V3.2, GLM-5): its widths, its rope,
and which layers have one of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from trueline.models.common import MAX_LAYERS, read_layer_types
from trueline.spec.fields import Fields
from trueline.spec.mixer import IndexerSpec
from trueline.spec.rope import RopeSpec
from trueline.spec.source import Fact, Source, Spec, default, formula

S = TypeVar("S", bound=Spec)
MAX_INDEX_HEADS = 65536
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
INDEXER_TYPES = ("full", "shared")
LETTERS = {"F": "full", "S": "shared"}


@dataclass(frozen=True)
class Indexing:
    """What a family's indexer has of its own."""

    interleaved: bool
    """How it rotates where the file does not say."""
    may_share: bool = False
    """Whether layers may see what an earlier one selected."""


def read_indexer(fields: Fields, own: Indexing, rope: RopeSpec, family: str) -> IndexerSpec:
    """Of a layer with an indexer of its own. It rotates by the same table as the layer's attention,
    over as many channels, but not always in the same pairing."""
    if fields.integer_or_null("q_lora_rank").value is None:
        fields.refuse("q_lora_rank", "an integer: the indexer's queries come from that latent")
    head_dim = fields.integer("index_head_dim", maximum=MAX_INDEX_HEADS)
    if head_dim.value < rope.dim:
        fields.refuse("index_head_dim", f"from qk_rope_head_dim = {rope.dim} up: so many rotate")
    return IndexerSpec.of(
        heads=fields.integer("index_n_heads", maximum=MAX_INDEX_HEADS),
        head_dim=head_dim,
        topk=fields.integer("index_topk"),
        rope=index_rope(rope, read_pairing(fields, own, family)),
        key_norm_eps=default(1e-6, "of the layer norm of keys, whatever rms_norm_eps says"),
        shared=False,
    )


def read_pairing(fields: Fields, own: Indexing, family: str) -> Fact[str]:
    """The key decides; without it the family does, as in transformers."""
    interleave = fields.boolean(
        "indexer_rope_interleave",
        default=default(own.interleaved, f"{family}: as transformers computes it"),
    )
    return Fact("interleaved" if interleave.value else "half-split", interleave.source)


def index_rope(rope: RopeSpec, pairing: Fact[str]) -> RopeSpec:
    dim = formula(rope.dim, "qk_rope_head_dim: the first channels of each head")
    off = formula(False, "mscale² belongs to the softmax, not to index scores")
    yarn = rope.yarn and rewritten(rope.yarn, apply_yarn_scaling=off)
    return replace(rewritten(rope, dim=dim, pairing=pairing), yarn=yarn)


def rewritten(spec: S, **facts: Fact[object]) -> S:
    """The same but for these facts and their sources."""
    sources = {name: fact.source for name, fact in facts.items()}
    values = {name: fact.value for name, fact in facts.items()}
    return replace(spec, **values, sources={**spec.sources, **sources})


def read_shared_layers(fields: Fields, own: Indexing, num_layers: int) -> Fact[tuple[bool, ...]]:
    """For each layer: does it see what the last full layer before it selected? Three spellings,
    which must agree where more than one is there."""
    if fields.has("layer_types"):
        read_layer_types(fields, "layer_types", LAYER_TYPES, num_layers)
    if not own.may_share:
        return formula((False,) * num_layers, "every layer has its own")
    # Of draft steps, which nobody runs yet; and an offset says nothing without a frequency.
    fields.ignore("index_share_for_mtp_iteration", "index_skip_topk_offset")
    found = [
        (key, read(fields, num_layers))
        for key, read in (
            ("indexer_types", _listed),
            ("index_topk_pattern", _pattern),
            ("index_topk_freq", _frequency),
        )
        if fields.has(key)
    ]
    if not found:
        return default((False,) * num_layers, "no key says otherwise: every layer has its own")
    first, shared = found[0]
    for key, other in found[1:]:
        if other.value != shared.value:
            differ = _differing(shared.value, other.value)
            fields.refuse(key, f"what '{first}' says too; they differ at layer {differ}")
    if shared.value[0]:
        fields.refuse(first, "layer 0 full: a shared layer sees what an earlier one selected")
    return shared


def _differing(one: tuple[bool, ...], two: tuple[bool, ...]) -> str:
    layers = [str(i) for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return ", ".join(layers[:4]) + (", …" if len(layers) > 4 else "")


def _listed(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    kinds = read_layer_types(fields, "indexer_types", INDEXER_TYPES, num_layers)
    return Fact(tuple(kind == "shared" for kind in kinds.value), kinds.source)


def _pattern(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    """A letter a layer; or the words that the letters stand for."""
    key = "index_topk_pattern"
    pattern = fields.raw[key]
    if isinstance(pattern, list):
        kinds = read_layer_types(fields, key, INDEXER_TYPES, num_layers)
        return Fact(tuple(kind == "shared" for kind in kinds.value), kinds.source)
    known = isinstance(pattern, str) and all(letter in LETTERS for letter in pattern)
    if not known or len(pattern) != num_layers:
        fields.refuse(key, f"{num_layers} letters, one a layer: F (full) or S (shared)")
    shared = tuple(LETTERS[letter] == "shared" for letter in pattern)
    return Fact(shared, Source("key", f"{fields.prefix}{key}"))


def _frequency(fields: Fields, num_layers: int) -> Fact[tuple[bool, ...]]:
    every = fields.integer("index_topk_freq", maximum=MAX_LAYERS).value
    offset = fields.integer(
        "index_skip_topk_offset",
        minimum=0,
        maximum=MAX_LAYERS,
        default=default(2, "transformers' value"),
    ).value
    return formula(
        tuple(max(layer - offset + 1, 0) % every != 0 for layer in range(num_layers)),
        f"shared where max(layer - {offset} + 1, 0) % {every} != 0 "
        "(index_skip_topk_offset, index_topk_freq)",
    )
