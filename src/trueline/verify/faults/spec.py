"""Mistakes in the spec, caught by the reference's own reading of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from trueline.models import common, deepseek, deepseek_v4
from trueline.spec import mixer, rope
from trueline.spec.fields import Fields
from trueline.spec.source import Fact, Spec, formula
from trueline.verify.faults import Fault, Make, Rewriting

S = TypeVar("S", bound=Spec)


def _spec_property(spec: type[S], change: Callable[[S, float], float]) -> Make:
    """A derived number of a spec, changed."""

    def make(original: property) -> property:
        return property(lambda self: change(self, original.__get__(self, spec)))

    return make


def _base_from_top_level_only(_: Make) -> Make:
    """rope_theta inside rope_parameters is not looked at; a guessed default fills in."""

    def broken(fields: Fields, section: Fields | None) -> Fact[float]:
        if section is not None:
            section.ignore("rope_theta")
        if fields.has("rope_theta"):
            return fields.number("rope_theta", above=1.0)
        return formula(10000.0, "guessed")

    return broken


def _only_legacy_rope(_: Make) -> Make:
    def broken(fields: Fields) -> Fields | None:
        fields.ignore("rope_parameters")
        return fields.section("rope_scaling")

    return broken


def _v4_nested_ignored(original: Make) -> Make:
    def broken(fields: Fields, max_position: object) -> object:
        plain, compressed = original(fields, max_position)
        nested = fields.raw.get("rope_parameters") is not None
        return plain, replace(compressed, yarn=None) if nested else compressed

    return broken


def _v4_yarn_everywhere(original: Make) -> Make:
    def broken(fields: object, max_position: object) -> object:
        plain, compressed = original(fields, max_position)
        return replace(plain, yarn=compressed.yarn), compressed

    return broken


def _v4_one_base(original: Make) -> Make:
    def broken(fields: object, max_position: object) -> object:
        plain, compressed = original(fields, max_position)
        return plain, replace(compressed, base=plain.base)

    return broken


def _yarn_without(**lost: object) -> Make:
    def make(original: Make) -> Make:
        def broken(section: object, max_position: object) -> object:
            yarn = original(section, max_position)
            return yarn if yarn.value is None else replace(yarn, value=replace(yarn.value, **lost))

        return broken

    return make


def _router_with(**wrong: object) -> Make:
    def make(original: Make) -> Make:
        return lambda *arguments: replace(original(*arguments), **wrong)

    return make


def _magnitude_again(spec: rope.RopeSpec, scale: float) -> float:
    assert spec.yarn is not None
    return scale * rope.yarn_magnitude(spec.yarn.factor, 1.0)


_ROPE, _MLA = rope.RopeSpec, mixer.MLASpec

SPEC_FAULTS = [
    Fault("spec-scale-of-cache-row", "softmax scale from the 576-wide row (story 3)", "one-spec",
          "v3", _MLA, "softmax_scale",
          _spec_property(_MLA, lambda s, _: (s.kv_lora_rank + s.qk_rope_head_dim) ** -0.5
                         * s.rope.score_scale)),
    Fault("spec-no-mscale", "softmax scale without mscale²", "one-spec", "v3",
          _MLA, "softmax_scale", _spec_property(_MLA, lambda s, v: v / s.rope.score_scale)),
    Fault("spec-half-rotation", "half of qk_rope_head_dim rotates (story 1)", "one-spec", "v3",
          deepseek, "replace_source",
          lambda original: lambda fact, text: replace(original(fact, text), value=fact.value // 2)),
    Fault("spec-half-split", "the default pairing is half-split", "one-spec", "v3",
          deepseek, "_pairing", lambda _: lambda line, fields: formula("half-split", "guessed")),
    Fault("spec-mscale-dropped", "mscale keys lost by a whitelist", "one-spec", "v3",
          common, "read_yarn", _yarn_without(mscale=0.0, mscale_all_dim=0.0)),
    Fault("spec-no-mscale-ratio", "cos and sin without mscale / mscale_all_dim", "one-spec", "v3",
          _ROPE, "cos_sin_scale", _spec_property(_ROPE, lambda s, v: 1.0)),
    Fault("spec-attention-factor-extra", "attention_factor as an extra multiplier", "one-spec",
          "v3-attention-factor", _ROPE, "cos_sin_scale",
          _spec_property(_ROPE, _magnitude_again)),
    Fault("spec-apply-yarn-scaling", "apply_yarn_scaling false is ignored", "one-spec",
          "v3-no-yarn-scaling", common, "read_yarn", _yarn_without(apply_yarn_scaling=True)),
    Fault("spec-betas-guessed", "beta_fast and beta_slow not read", "one-spec",
          "v3-rope-parameters", common, "read_yarn", _yarn_without(beta_fast=32.0, beta_slow=1.0)),
    Fault("spec-original-length", "original length taken from max_position_embeddings", "one-spec",
          "v3", common, "read_yarn", _yarn_without(original_max_position=8192)),
    Fault("spec-truncate", "truncate false is ignored", "one-spec", "v3-no-truncate",
          common, "read_yarn", _yarn_without(truncate=True)),
    Fault("spec-rope-parameters-unread", "only rope_scaling is looked at", "one-spec",
          "v3-mixed-spelling", common, "rope_section", _only_legacy_rope),
    Fault("spec-theta-guessed", "rope_theta read at top level only", "one-spec",
          "v3-rope-parameters", common, "_rope_base", _base_from_top_level_only),
    Fault("spec-ramp", "YaRN's ramp shifted by one channel", "one-spec", "v3",
          _ROPE, "correction_range",
          lambda original: property(
              lambda s: None if s.yarn is None else tuple(x + 1 for x in original.fget(s)))),
    Fault("spec-latent-eps", "q_a and kv_a norms take another eps", "one-spec", "glm",
          deepseek, "LATENT_NORM_EPS", lambda _: formula(1e-5, "rms_norm_eps")),
    Fault("spec-group-max", "V3 groups compete by max", "one-spec", "v3",
          deepseek, "RouterSpec",
          lambda original: Rewriting(original, group_score=formula("max", "guessed"))),
    Fault("spec-softmax-router", "scoring falls back to softmax", "one-spec", "k2",
          deepseek, "RouterSpec",
          lambda original: Rewriting(original, scoring=formula("softmax", "guessed"))),
    Fault("spec-no-bias", "the correction bias is not known", "one-spec", "glm",
          deepseek, "RouterSpec",
          lambda original: Rewriting(original, correction_bias=formula(False, "guessed"))),
    Fault("spec-scaling-lost", "routed_scaling_factor lost", "one-spec", "v2",
          deepseek, "RouterSpec",
          lambda original: Rewriting(original, scaling_factor=formula(1.0, "guessed"))),
    Fault("spec-all-moe", "first_k_dense_replace is ignored", "one-spec", "v3",
          deepseek, "_first_moe_layer",
          lambda original: lambda *a: replace(original(*a), value=0)),
    Fault("spec-v4-mscale", "V4's softmax scale with mscale² (story 3)", "one-spec", "v4",
          mixer.CompressedSpec, "softmax_scale",
          _spec_property(
              mixer.CompressedSpec, lambda s, v: v * rope.yarn_magnitude(16.0, 1.0) ** 2)),
    Fault("spec-v4-cos-sin", "V4's cos and sin times YaRN's magnitude", "one-spec", "v4",
          _ROPE, "cos_sin_scale",
          _spec_property(
              _ROPE, lambda s, v: rope.yarn_magnitude(s.yarn.factor, 1) if s.yarn else v)),
    Fault("spec-v4-yarn-everywhere", "V4's window layers with YaRN", "one-spec", "v4",
          deepseek_v4, "read_ropes", _v4_yarn_everywhere),
    Fault("spec-v4-one-base", "V4's compressed layers with rope_theta", "one-spec", "v4",
          deepseek_v4, "read_ropes", _v4_one_base),
    Fault("spec-v4-nested", "V4's nested rope_parameters read as default", "one-spec",
          "v4-nested", deepseek_v4, "read_ropes", _v4_nested_ignored),
]  # fmt: skip
