"""DeepSeek V4 as an executable definition: full sequence, no cache, one function a step. Letters as
in `model.py`, with d channels a head, S residual streams, a window of W, N compressed entries.

One row of d channels a token is key and value for all heads. Its last R channels are rotated, so
those of the output are rotated back at the query's position. What a query sees is decided by places
in the sequence, angles by `positions`.
"""

from functools import partial

import torch
from torch import Tensor

from trueline.reference import compressor, hyper_connections, model, published, v4_facts
from trueline.reference import config as facts
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rms_norm_rounded_once,
    rotate_last,
    unit_rms,
    wide,
)
from trueline.reference.indexer import Selections
from trueline.reference.model import Forced, Half, Reference, Sequence, Trace


def rope_table(config: Config, layer: int, positions: Tensor) -> Pair:
    """cos, sin [T, R/2], float32 in every model dtype: a finer table is a different function."""
    angle = positions.to(torch.float32)[:, None] * facts.v4_inverse_frequencies(config, layer)
    return angle.cos(), angle.sin()


def query_latent(config: Config, params: Params, at: str, x: Tensor) -> Tensor:
    """[T, Q], normalised."""
    q = linear(params, f"{at}.q_a_proj", x)
    return rms_norm_rounded_once(q, params[f"{at}.q_a_layernorm.weight"], config.rms_norm_eps)


def queries(config: Config, params: Params, at: str, q_latent: Tensor, rope: Pair) -> Tensor:
    """[T, H, d]; each head at unit RMS before it is rotated."""
    q = linear(params, f"{at}.q_b_proj", q_latent)
    q = q.view(len(q), config.num_attention_heads, -1)
    return rotate_last(unit_rms(q, config.rms_norm_eps).to(q.dtype), rope)


def window_keys(config: Config, params: Params, at: str, x: Tensor, rope: Pair) -> Tensor:
    """[T, d]: what a cache would hold."""
    row = linear(params, f"{at}.kv_proj", x)
    row = rms_norm_rounded_once(row, params[f"{at}.kv_norm.weight"], config.rms_norm_eps)
    return published.stored_key(params, rotate_last(row, rope), config.qk_rope_head_dim)


def visible_window(count: int, window: int) -> Tensor:
    """[T, T]: a query's own place and those before it, W in all."""
    place = torch.arange(count)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)


def compressed(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    q_latent: Tensor,
    rope: Pair,
    selections: Selections,
) -> Pair:
    """Entries [N, d], and which of them each query sees [T, N]."""
    v4 = config.v4_facts
    at = f"model.layers.{layer}.self_attn.compressor"
    rows = compressor.entries(config, params, layer, at, x, rope)
    rows = published.stored_key(params, rows, config.qk_rope_head_dim)
    if v4.forms[layer] == v4_facts.SPARSE:
        return rows, compressor.select(config, params, layer, x, q_latent, rope, selections)
    return rows, compressor.visible_entries(len(x), v4.ratios[layer])


def attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor, softmax_scale: float) -> Tensor:
    """[T, H, d]. A head's sink takes its share of the softmax and gives nothing."""
    scores = torch.einsum("thd,kd->htk", q, keys) * softmax_scale
    scores = scores.masked_fill(~seen, float("-inf"))
    sink = sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("htk,kd->thd", weights, keys)


def output(config: Config, params: Params, at: str, heads: Tensor) -> Tensor:
    """[T, D]: each group of heads through a matrix of its own, then all of them together."""
    groups, rank = config.v4_facts.o_groups, config.v4_facts.o_lora_rank
    own = params[f"{at}.o_a_proj.weight"].view(groups, rank, -1)
    low = torch.einsum("tgi,gri->tgr", heads.reshape(len(heads), groups, -1), own)
    return linear(params, f"{at}.o_b_proj", low.flatten(1))


def attention(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    positions: Tensor,
    selections: Selections,
) -> Tensor:
    at, v4 = f"model.layers.{layer}.self_attn", config.v4_facts
    cos, sin = rope_table(config, layer, positions)
    q_latent = query_latent(config, params, at, x)
    q = queries(config, params, at, q_latent, (cos, sin))
    keys = window_keys(config, params, at, x, (cos, sin))
    seen = visible_window(len(x), v4.sliding_window)
    if v4.forms[layer] != v4_facts.WINDOW:
        rows, chosen = compressed(config, params, layer, x, q_latent, (cos, sin), selections)
        keys, seen = torch.cat((keys, rows)), torch.cat((seen, chosen), dim=1)
    sinks = wide(params[f"{at}.sinks"])
    heads = attend(wide(q), wide(keys), seen, sinks, v4_facts.softmax_scale(v4)).to(x.dtype)
    return output(config, params, at, rotate_last(heads, (cos, -sin)))


def clamped_swiglu(params: Params, at: str, x: Tensor, limit: float) -> Tensor:
    """The gate is clamped from above only."""
    gate = linear(params, f"{at}.gate_proj", x).clamp(max=limit)
    up = linear(params, f"{at}.up_proj", x).clamp(-limit, limit)
    return linear(params, f"{at}.down_proj", torch.nn.functional.silu(gate) * up)


def route(config: Config, params: Params, layer: int, x: Tensor, tokens: Tensor) -> Pair:
    """Expert ids and weights [T, K]. Hash layers look the ids up by token; weights come from the
    scores all the same."""
    at = f"model.layers.{layer}.mlp.gate"
    scores = model.router_scores(config, x, params[f"{at}.weight"])
    if config.v4_facts.hashed[layer]:
        ids = params[f"{at}.tid2eid"][tokens]
    else:
        ids = model.choose_experts(config, scores, params[f"{at}.e_score_correction_bias"])
    return ids, model.expert_weights(config, scores, ids)


def moe(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    tokens: Tensor,
    trace: Trace,
    forced: Forced,
) -> Tensor:
    at = f"model.layers.{layer}.mlp"
    ids, weights = route(config, params, layer, x, tokens)
    if layer in forced:
        ids = forced[layer]
        scores = model.router_scores(config, x, params[f"{at}.gate.weight"])
        weights = model.expert_weights(config, scores, ids)
    if trace is not None:
        trace[layer] = ids
    feed = partial(clamped_swiglu, limit=config.v4_facts.swiglu_limit)
    routed = model.routed_sum(params, at, x, (ids, weights), feed)
    return routed + feed(params, f"{at}.shared_experts", x)


class V4Reference(Reference):
    """Its prefill and its decode compute the same thing, so `form` changes nothing. `selected` of
    `logits` receives the entries that each sparse layer chose ([T, index_topk], best first, -1
    where there are fewer)."""

    def start(self, tokens: Tensor) -> Tensor:
        h = super().start(tokens)
        return h[:, None].expand(-1, self.config.v4_facts.hc_mult, -1)

    def entry(self, layer: int, half: Half, h: Tensor) -> Tensor:
        pre, _, _ = self.coefficients(layer, half, h)
        weight = self.params[f"model.layers.{layer}.{half.norm}.weight"]
        x = hyper_connections.gathered(h, pre)
        return rms_norm_rounded_once(x, weight, self.config.rms_norm_eps)

    def mixed(self, layer: int, x: Tensor, sequence: Sequence) -> Tensor:
        given = sequence.places, sequence.selections
        return attention(self.config, self.params, layer, x, *given)

    def fed(self, layer: int, x: Tensor, sequence: Sequence) -> Tensor:
        given = sequence.tokens, sequence.trace, sequence.forced
        return moe(self.config, self.params, layer, x, *given)

    def add(self, layer: int, half: Half, h: Tensor, y: Tensor) -> Tensor:
        _, post, carry = self.coefficients(layer, half, h)
        return hyper_connections.merged(h, y, post, carry)

    def coefficients(self, layer: int, half: Half, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at = f"model.layers.{layer}.{half.mixing}"
        return hyper_connections.coefficients(self.config, self.params, at, h)

    def head(self, h: Tensor) -> Tensor:
        """Float32 at least."""
        x = hyper_connections.head(self.config, self.params, h)
        x = rms_norm_rounded_once(x, self.params["model.norm.weight"], self.config.rms_norm_eps)
        return wide(x) @ wide(self.params["lm_head.weight"]).T
