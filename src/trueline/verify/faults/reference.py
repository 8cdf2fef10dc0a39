"""Mistakes in the reference, caught by an oracle that shares no code with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trueline.models import deepseek
from trueline.reference import config as reference_config
from trueline.reference import model as reference_model
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rotate_half_split,
    rotate_interleaved,
)
from trueline.verify.faults import Fault, Make


def _half_rotation(rotate: Make) -> Make:
    def broken(config: Config, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 4 * 2
        rotated: Tensor = rotate(
            config, x[..., :half], cos[..., : half // 2], sin[..., : half // 2]
        )
        return torch.cat((rotated, x[..., half:]), dim=-1)

    return broken


def _value_first(_: Make) -> Make:
    def broken(config: Config, weight: Tensor) -> tuple[Tensor, Tensor]:
        heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
        return heads[:, config.v_head_dim :], heads[:, : config.v_head_dim]

    return broken


def _latent_without_norm(_: Make) -> Make:
    def broken(
        config: Config, params: Params, at: str, x: Tensor, table: Pair
    ) -> tuple[Tensor, Tensor]:
        kv = linear(params, f"{at}.kv_a_proj_with_mqa", x)
        c, p = kv[:, : config.kv_lora_rank], kv[:, config.kv_lora_rank :]
        return c, reference_model.rotate(config, p, *table)

    return broken


def _keys_of_all_heads_first(_: Make) -> Make:
    def broken(config: Config, weight: Tensor) -> tuple[Tensor, Tensor]:
        cut = config.num_attention_heads * config.qk_nope_head_dim
        shape = (config.num_attention_heads, -1, config.kv_lora_rank)
        return weight[:cut].view(shape), weight[cut:].view(shape)

    return broken


def _shared_key_unrotated(latent: Make) -> Make:
    def broken(
        config: Config, params: Params, at: str, x: Tensor, table: Pair
    ) -> tuple[Tensor, Tensor]:
        raw = linear(params, f"{at}.kv_a_proj_with_mqa", x)
        return latent(config, params, at, x, table)[0], raw[:, config.kv_lora_rank :]

    return broken


def _with_norm_eps(original: Make) -> Make:
    return lambda config, *rest: original(
        replace(config, latent_norm_eps=config.rms_norm_eps), *rest
    )


def _bias_in_weights(route: Make) -> Make:
    def broken(config: Config, x: Tensor, gate: Tensor, bias: Tensor | None) -> object:
        ids, _ = route(config, x, gate, bias)
        scores = reference_model.router_scores(config, x, gate)
        biased = scores if bias is None else scores + bias
        return ids, reference_model.expert_weights(config, biased, ids)

    return broken


def _bias_undone(route: Make) -> Make:
    def broken(config: Config, x: Tensor, gate: Tensor, bias: Tensor | None) -> object:
        ids, _ = route(config, x, gate, bias)
        scores = reference_model.router_scores(config, x, gate)
        if bias is not None:
            scores = (scores.float() + bias.float()) - bias.float()
        return ids, reference_model.expert_weights(config, scores, ids)

    return broken


def _weights(change: Callable[[Config, Tensor, Tensor], Tensor]) -> Make:
    """expert_weights, computed by `change(config, gathered scores, all scores)`."""

    def make(_: Make) -> Make:
        def broken(config: Config, scores: Tensor, ids: Tensor) -> Tensor:
            return change(config, scores.gather(1, ids), scores)

        return broken

    return make


def _scaled_shared(swiglu: Make) -> Make:
    def broken(params: Params, at: str, x: Tensor) -> Tensor:
        y: Tensor = swiglu(params, at, x)
        return y * 2.5 if at.endswith("shared_experts") else y

    return broken


def _swapped_gate_up(_: Make) -> Make:
    def broken(params: Params, at: str, x: Tensor) -> Tensor:
        gate, up = (linear(params, f"{at}.{n}_proj", x) for n in ("gate", "up"))
        return linear(params, f"{at}.down_proj", gate * torch.sigmoid(up) * up)

    return broken


def _float64_table(_: Make) -> Make:
    def broken(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * reference_config.inverse_frequencies(config).double()
        scale = reference_config.cos_sin_scale(config)
        return angle.cos() * scale, angle.sin() * scale

    return broken


def _low_precision_router(_: Make) -> Make:
    def broken(config: Config, x: Tensor, gate: Tensor) -> Tensor:
        logits = (x.bfloat16() @ gate.bfloat16().T).to(x.dtype)
        return logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()

    return broken


def _masked_with_zero(limit_groups: Make) -> Make:
    def broken(config: Config, choice: Tensor) -> Tensor:
        limited: Tensor = limit_groups(config, choice)
        return limited.masked_fill(limited.isinf(), 0.0)

    return broken


def _sees_all(_: Make) -> Make:
    return lambda count: torch.ones(count, count, dtype=torch.bool)


def _mean_norm(_: Make) -> Make:
    def broken(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, eps)

    return broken


def _scale(change: Callable[[Config, float], float]) -> Make:
    return lambda original: lambda config: change(config, original(config))


def _magnitude(config: Config) -> float:
    yarn = config.yarn
    return 1.0 if yarn is None else reference_config.mscale(yarn.factor, yarn.mscale_all_dim)


_MODEL, _CONFIG = reference_model, reference_config

REFERENCE_FAULTS = [
    Fault("half-split-for-interleaved", "MLA rotates half-split instead of interleaved channels",
          "oracle", "v3",
          _MODEL, "rotate", lambda _: lambda c, x, cos, sin: rotate_half_split(x, cos, sin)),
    Fault("interleaved-for-half-split", "rope_interleave false is ignored", "oracle",
          "v3-half-split", _MODEL, "rotate",
          lambda _: lambda c, x, cos, sin: rotate_interleaved(x, cos, sin)),
    Fault("half-rotation", "partial_rotary_factor halves the rotated dims (story 1)", "oracle",
          "v3", _MODEL, "rotate", _half_rotation),
    Fault("no-mscale", "softmax scale without YaRN's mscale²", "oracle", "v3",
          _CONFIG, "softmax_scale", _scale(lambda c, s: s / _magnitude(c) ** 2)),
    Fault("mscale-once", "softmax scale with mscale instead of mscale²", "oracle", "v3",
          _CONFIG, "softmax_scale", _scale(lambda c, s: s / _magnitude(c))),
    Fault("scale-of-cache-row", "softmax scale from the latent row L + R (story 3)", "oracle",
          "v3", _CONFIG, "softmax_scale",
          lambda _: lambda c: (c.kv_lora_rank + c.qk_rope_head_dim) ** -0.5 * _magnitude(c) ** 2),
    Fault("scale-of-nope", "softmax scale from the unrotated part only", "oracle", "v2-lite",
          _CONFIG, "softmax_scale", lambda _: lambda c: c.qk_nope_head_dim ** -0.5),
    Fault("yarn-ignored", "plain frequencies where YaRN is configured", "oracle", "v3",
          _CONFIG, "inverse_frequencies",
          lambda _: lambda c: _CONFIG.frequencies(c.rope_theta, None, c.qk_rope_head_dim)),
    Fault("mscale-twice", "cos and sin carry mscale that the softmax scale has too", "oracle",
          "k2", _CONFIG, "cos_sin_scale", _scale(lambda c, s: s * _magnitude(c))),
    Fault("no-cos-sin-scale", "mscale ≠ mscale_all_dim is not applied to cos and sin", "oracle",
          "v3", _CONFIG, "cos_sin_scale", lambda _: lambda c: 1.0),
    Fault("float64-table", "rope table in float64", "oracle", "v3",
          _MODEL, "rope_table", _float64_table),
    Fault("kv-b-value-first", "kv_b_proj read as [value | key]", "oracle", "v2",
          _MODEL, "split_kv_b", _value_first),
    Fault("latent-unnormed", "the latent is used before kv_a_layernorm", "oracle", "v3",
          _MODEL, "latent", _latent_without_norm),
    Fault("kv-a-eps", "kv_a_layernorm takes rms_norm_eps (1e-5 in GLM)", "oracle", "glm",
          _MODEL, "latent", _with_norm_eps),
    Fault("q-a-eps", "q_a_layernorm takes rms_norm_eps (1e-5 in GLM)", "oracle", "glm",
          _MODEL, "query", _with_norm_eps),
    Fault("kv-b-not-per-head", "kv_b_proj read as all keys, then all values", "oracle", "v3",
          _MODEL, "split_kv_b", _keys_of_all_heads_first),
    Fault("rope-key-unrotated", "the shared key is cached before rotation", "oracle", "k2",
          _MODEL, "latent", _shared_key_unrotated),
    Fault("layer-norm", "layer norm instead of RMS norm", "oracle", "v3",
          _MODEL, "rms_norm", _mean_norm),
    Fault("non-causal", "attention sees later tokens", "oracle", "v2-lite",
          _MODEL, "visible", _sees_all),
    Fault("bias-in-weights", "the correction bias leaks into the combine weights", "oracle", "v3",
          _MODEL, "route", _bias_in_weights),
    Fault("bias-unused", "the correction bias is not used for choosing", "oracle", "v3",
          _MODEL, "choose_experts",
          lambda original: lambda c, scores, bias: original(c, scores, None)),
    Fault("no-group-limit", "experts are chosen outside the best groups", "oracle", "v3",
          _MODEL, "limit_groups", lambda _: lambda c, choice: choice),
    Fault("group-max", "V3 groups compete by their best expert, not by their best two", "oracle",
          "v3", _MODEL, "group_scores",
          lambda _: lambda c, x: x.view(len(x), c.n_group, -1).amax(-1)),
    Fault("group-top2-for-v2", "V2 groups compete by their best two", "oracle", "v2",
          _MODEL, "group_scores",
          lambda _: lambda c, x: x.view(len(x), c.n_group, -1).topk(2).values.sum(-1)),
    Fault("masked-with-zero", "excluded experts get 0, which wins over negative scores",
          "routing", "v3", _MODEL, "limit_groups", _masked_with_zero),
    Fault("no-epsilon", "0 / 0 when every chosen score underflows", "routing", "v3",
          _MODEL, "expert_weights",
          _weights(lambda c, w, s: w / w.sum(-1, keepdim=True) * c.routed_scaling_factor)),
    Fault("highest-index-wins", "ties go to the highest index", "routing", "k2",
          _MODEL, "top_k",
          lambda original: lambda x, k: x.shape[-1] - 1 - original(x.flip(-1), k)),
    Fault("bias-undone", "scores recovered as (score + bias) - bias", "routing", "v3",
          _MODEL, "route", _bias_undone),
    Fault("scaling-dropped", "routed_scaling_factor is not applied", "oracle", "v3",
          _MODEL, "expert_weights", _weights(lambda c, w, s: w / (w.sum(-1, keepdim=True)))),
    Fault("scaling-twice", "routed_scaling_factor is applied twice", "oracle", "k2",
          _MODEL, "expert_weights",
          lambda original: lambda c, s, i: original(c, s, i) * c.routed_scaling_factor),
    Fault("v2-renormalised", "V2's softmax weights are renormalised", "oracle", "v2",
          _MODEL, "expert_weights",
          _weights(lambda c, w, s: w / w.sum(-1, keepdim=True) * c.routed_scaling_factor)),
    Fault("not-renormalised", "norm_topk_prob is ignored", "oracle", "k2",
          _MODEL, "expert_weights", _weights(lambda c, w, s: w * c.routed_scaling_factor)),
    Fault("normalised-over-all", "weights renormalised over all experts", "oracle", "k2",
          _MODEL, "expert_weights",
          _weights(lambda c, w, s: w / s.sum(-1, keepdim=True) * c.routed_scaling_factor)),
    Fault("softmax-for-sigmoid", "missing scoring_func falls back to softmax", "oracle", "k2",
          _MODEL, "router_scores", lambda _: lambda c, x, gate: (x @ gate.T).softmax(-1)),
    Fault("router-bf16", "router logits in bfloat16", "oracle", "v3",
          _MODEL, "router_scores", _low_precision_router),
    Fault("shared-scaled", "the shared expert is multiplied by routed_scaling_factor", "oracle",
          "v3", _MODEL, "swiglu", _scaled_shared),
    Fault("gate-up-swapped", "silu on the up projection", "oracle", "v2-lite",
          _MODEL, "swiglu", _swapped_gate_up),
    Fault("dense-layers-off-by-one", "first_k_dense_replace counted from one", "ledger", "v3",
          deepseek, "_first_moe_layer",
          lambda original: lambda *a: replace(original(*a), value=original(*a).value + 1)),
    Fault("absorbed-other-scale", "decode's scale lacks mscale²", "absorbed = expanded", "v3",
          _MODEL, "attend_absorbed",
          lambda original: lambda c, *rest: original(
              replace(c, yarn=replace(c.yarn, apply_yarn_scaling=False)), *rest)),
    Fault("absorbed-no-rope-key", "decode leaves the rotated key out", "absorbed = expanded", "v2",
          _MODEL, "attend_absorbed",
          lambda original: lambda c, q, *rest: original(c, (q[0], q[1] * 0), *rest)),
    Fault("absorbed-key-for-value", "decode reads values from the key rows", "absorbed = expanded",
          "v2", _MODEL, "attend_absorbed",
          lambda original: lambda c, q, kv, w, seen: original(
              c, q, kv, (w[0], w[0][:, : w[1].shape[1]]), seen)),
]  # fmt: skip
