"""Mistakes in Ling's facts, weights and definition: those of the spec are caught by the reference's
own reading, those of the reference by its other form or by the sum that both stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trueline.models import bailing
from trueline.reference import bailing as reference_bailing
from trueline.reference import config as reference_config
from trueline.reference import lightning
from trueline.reference import model as reference_model
from trueline.reference.bailing import LinearFacts
from trueline.reference.config import Config
from trueline.reference.functional import Params, rms_norm, rotate_interleaved
from trueline.spec import mixer
from trueline.spec.fields import Fields
from trueline.spec.parameters import Piece
from trueline.spec.source import Fact, Span, formula
from trueline.verify.faults import Fault, Make, Rewriting
from trueline.weights import load

"""Tables of latent and of linear layers."""


def _linear(**wrong: object) -> Make:
    """The linear layers' spec with some facts wrong."""
    guessed = {name: formula(value, "guessed") for name, value in wrong.items()}
    return lambda original: Rewriting(original, **guessed)


def _partial_mla(original: Make) -> Make:
    """partial_rotary_factor applied to the latent layers too (story 1)."""

    def broken(fields: Fields) -> Fact[int]:
        dim: Fact[int] = original(fields)
        return replace(dim, value=int(dim.value * fields.raw["partial_rotary_factor"]))

    return broken


def _partial_mla_frequencies(_: Make) -> Make:
    def broken(config: Config) -> Tensor:
        linear = config.linear_facts
        dim = config.qk_rope_head_dim * linear.rotary_dim // linear.head_dim
        return reference_config.frequencies(config.rope_theta, config.yarn, dim)

    return broken


def _whole_head_rotates(original: Make) -> Make:
    return lambda fields, section: replace(original(fields, section), value=fields.raw["head_dim"])


def _renumbered(group: int) -> Make:
    """Linear layers counted among themselves."""
    return lambda original: lambda linear, layer: original(linear, layer - layer // group)


def _renumbered_slopes(original: Make) -> Make:
    def broken(linear: LinearFacts, heads: int, layers: int, layer: int) -> object:
        return original(linear, heads, layers, layer - layer // linear.layer_group_size)

    return broken


def _first_rank_everywhere(original: property) -> property:
    def broken(spec: mixer.LightningSpec) -> object:
        first = replace(spec, heads=Span(0, spec.heads.count, spec.heads.total))
        return original.__get__(first, mixer.LightningSpec)

    return property(broken)


def _no_tail(_: Make) -> Make:
    def broken(fields: Fields, num_layers: int) -> object:
        group = fields.integer("layer_group_size").value
        return formula(tuple((i + 1) % group == 0 for i in range(num_layers)), "guessed")

    return broken


def _as_ling_3(original: Make) -> Make:
    """What Ling 3 means by the same keys: its linear layers neither rotate nor norm q and k by
    weights."""

    def broken(fields: object, rope: object, *rest: object) -> object:
        return replace(original(fields, rope, *rest), rope=None, qk_norm=False)

    return broken


def _interleaved(_: Make) -> Make:
    def broken(config: Config, rows: Tensor) -> object:
        return rows.view(len(rows), config.num_attention_heads, 3, -1).unbind(2)

    return broken


def _a_third_of_all_rows(_: Make) -> Make:
    """A rank takes one run of the three matrices together."""

    def broken(self: Piece) -> Iterator[Piece]:
        if self.runs == 1:
            yield self
            return
        rows = self.take[0]
        yield replace(self, take=(slice(3 * rows.start, 3 * rows.stop),), runs=1)

    return broken


def _groups_as_width(_: Make) -> Make:
    def broken(config: Config, x: Tensor, weight: Tensor) -> Tensor:
        shape = (-1, config.linear_facts.group_norm_size)
        normed = rms_norm(x.view(len(x), *shape), weight.view(shape), config.rms_norm_eps)
        return normed.flatten(1)

    return broken


def _gate_before_the_norms_weight(gated: Make) -> Make:
    def broken(config: Config, params: Params, layer: int, heads: Tensor, x: Tensor) -> object:
        return gated(
            config, params, layer, heads, x / params[f"model.layers.{layer}.input_layernorm.weight"]
        )

    return broken


def _undecayed_at_the_boundary(_: Make) -> Make:
    return lambda slopes, count: lightning.decay(slopes, torch.arange(count))


def _read_before_write(_: Make) -> Make:
    def broken(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
        keep = lightning.decay(slopes, torch.ones(1, 1))
        out = []
        for t in range(q.shape[1]):
            state = keep * state
            out.append((q[:, t, None, :] @ state)[:, 0])
            state = state + k[:, t, :, None] * v[:, t, None, :]
        return torch.stack(out, dim=1)

    return broken


def _rotated_last(original: Make) -> Make:
    return lambda x, rope: original(x.flip(-1), rope).flip(-1)


def _rows_at_unit_length(_: Make) -> Make:
    def broken(self: load.UnitColumns) -> Tensor:
        return torch.nn.functional.normalize(self.numbers.double(), dim=1)

    return broken


_LINEAR, _MIX = lightning, reference_model

LING_FAULTS = [
    Fault("ling-spec-half-rotation", "partial_rotary_factor cuts the latent rotation (story 1)",
          "one-spec", "ling", bailing, "mla_rope_dim", _partial_mla),
    Fault("ling-half-rotation", "the reference cuts the latent rotation (story 1)", "one-spec",
          "ling", reference_config, "inverse_frequencies", _partial_mla_frequencies),
    Fault("ling-spec-full-rotation", "linear layers rotate whole heads", "one-spec", "ling",
          bailing, "read_linear_rope_dim", _whole_head_rotates),
    Fault("ling-rotation-last", "linear layers rotate the last channels", "linear = sum", "ling",
          _LINEAR, "rotate_first", _rotated_last),
    Fault("ling-spec-interleaved", "linear layers rotate interleaved channels", "one-spec", "ling",
          bailing, "RopeSpec",
          lambda original: Rewriting(original, pairing=formula("interleaved", "guessed"))),
    Fault("ling-interleaved", "the reference's linear layers rotate interleaved channels",
          "linear = sum", "ling-far", _LINEAR, "rotate_half_split", lambda _: rotate_interleaved),
    Fault("ling-spec-slope-renumbered", "slope by the number among linear layers", "one-spec",
          "ling", bailing, "at_layer", _renumbered(3)),
    Fault("ling-slope-renumbered", "the reference's slope by that number", "linear = sum", "ling",
          reference_bailing, "slopes", _renumbered_slopes),
    Fault("ling-spec-layer-factor", "slopes by l - 1 where nobody asked for it", "one-spec",
          "ling", bailing, "LAYER_FACTOR", lambda _: formula("l-1", "guessed")),
    Fault("ling-fact-ignored", "linear_layer_factor is not listened to", "one-spec", "ling-l-1",
          bailing, "LightningSpec", _linear(linear_layer_factor="l")),
    Fault("ling-layer-factor", "the reference's slopes by l - 1", "linear = sum", "ling",
          reference_bailing, "LAYER_FACTORS", lambda _: ("l-1", "l")),
    Fault("ling-rank-slopes", "every rank has the slopes of rank 0", "one-spec", "ling",
          mixer.LightningSpec, "slopes", _first_rank_everywhere),
    Fault("ling-spec-tail", "layers behind the last whole group are linear", "one-spec", "ling",
          bailing, "read_mla_layers", _no_tail),
    Fault("ling-as-ling-3", "a V2.5 directory read with Ling 3's facts", "one-spec", "ling",
          bailing, "read_lightning", _as_ling_3),
    Fault("ling-no-dispatch", "Ling 3 is read as V2.5: architectures not looked at", "strict",
          "ling", bailing, "check_dispatch", lambda _: lambda fields: fields.has("architectures")),
    Fault("ling-spec-groups", "group_norm_size taken for a width", "one-spec", "ling",
          bailing, "LightningSpec", _linear(norm_groups=Span.whole(30))),
    Fault("ling-groups", "the reference takes group_norm_size for a width", "linear = sum", "ling",
          _LINEAR, "group_norm", _groups_as_width),
    Fault("ling-spec-qk-norm", "use_qk_norm false is ignored", "one-spec", "ling-silu",
          bailing, "LightningSpec", _linear(qk_norm=True)),
    Fault("ling-spec-silu", "linear_silu is ignored", "one-spec", "ling-silu",
          bailing, "LightningSpec", _linear(silu=False)),
    Fault("ling-qkv-interleaved", "q, k and v rows read head by head", "linear = sum", "ling",
          _LINEAR, "split_qkv", _interleaved),
    Fault("ling-rank-rows", "a rank takes one run of q, k and v together", "ranks = whole", "ling",
          Piece, "split", _a_third_of_all_rows),
    Fault("ling-no-scale", "linear attention without its scale", "linear = sum", "ling-silu",
          _LINEAR, "scale", lambda _: lambda config: 1.0),
    Fault("ling-gate", "the gate of the input before its norm's weight", "linear = sum", "ling",
          _LINEAR, "gated", _gate_before_the_norms_weight),
    Fault("ling-tile-decay", "the first token of a tile sees the state undecayed",
          "absorbed = expanded", "ling", _LINEAR, "carried_decay", _undecayed_at_the_boundary),
    Fault("ling-read-before-write", "a token does not see itself", "absorbed = expanded", "ling",
          _LINEAR, "attend_recurrent", _read_before_write),
    Fault("ling-spec-no-bias", "expert_bias is not known", "one-spec", "ling",
          bailing, "RouterSpec",
          lambda original: Rewriting(original, correction_bias=formula(False, "guessed"))),
    Fault("ling-bias-unused", "expert_bias is not used for choosing", "routing", "ling",
          _MIX, "choose_experts",
          lambda original: lambda c, scores, bias: original(c, scores, None)),
    Fault("ling-shared-width", "the shared expert is as wide as a routed one", "one-spec", "ling",
          bailing, "read_shared_width",
          lambda original: lambda fields, width, key: replace(
              original(fields, width, key), value=Span.whole(fields.raw["moe_intermediate_size"]))),
    Fault("ling-names", "word_embeddings, attention and dense are not known", "ledger", "ling",
          bailing, "RENAMED", lambda _: ()),
    Fault("ling-head-as-stored", "norm_head is ignored", "ledger", "ling-norm-head",
          bailing, "ModelSpec",
          lambda original: Rewriting(original, norm_head=formula(False, "guessed"))),
    Fault("ling-head-rows", "norm_head norms words, not channels", "ledger", "ling-norm-head",
          load.UnitColumns, "dequantise", _rows_at_unit_length),
]  # fmt: skip
