"""The DeepSeek line, sparse or not, and Ling with its linear layers, as an executable definition:
full sequence, no cache, one function a step.

Letters: T tokens, D hidden, H heads, P/R/V widths of the plain, rotated and value part of a head,
L latent, E experts, K chosen experts. Weights are [out, in], under their published names. Tests
replace these functions one by one to seed faults, so each step is called by its module name.
"""

from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trueline.reference import config as facts
from trueline.reference import indexer, lightning
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rms_norm,
    rotate_half_split,
    rotate_interleaved,
    top_k,
    wide,
)
from trueline.reference.indexer import Selections

Ints = abc.Sequence[int] | Tensor
Trace = dict[int, Tensor] | None  # layer -> expert ids [T, K]
Forced = Mapping[int, Tensor]  # the same


class Half(NamedTuple):
    """Of a layer: names of the weights that its entry has."""

    norm: str
    mixing: str


MIX, FEED = Half("input_layernorm", "hc_attn"), Half("post_attention_layernorm", "hc_ffn")


def rope_table(config: Config, positions: Tensor) -> Pair:
    """cos, sin [T, R/2], float32 in every model dtype: a finer table is a different function."""
    return cos_sin(config, facts.inverse_frequencies(config), positions)


def linear_rope_table(config: Config, positions: Tensor) -> Pair | None:
    """The same for linear layers; None where they do not rotate."""
    if config.linear is None or config.linear.rotary_dim == 0:
        return None
    return cos_sin(config, facts.linear_inverse_frequencies(config), positions)


def cos_sin(config: Config, inverse_frequencies: Tensor, positions: Tensor) -> Pair:
    angle = positions.to(torch.float32)[:, None] * inverse_frequencies
    scale = facts.cos_sin_scale(config)
    return angle.cos() * scale, angle.sin() * scale


def rotate(config: Config, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All R channels of x [..., T, R]."""
    return (
        rotate_interleaved(x, cos, sin)
        if config.rope_interleaved
        else rotate_half_split(x, cos, sin)
    )


def query_latent(config: Config, params: Params, at: str, x: Tensor) -> Tensor:
    """[T, Q], normalised."""
    q = linear(params, f"{at}.q_a_proj", x)
    return rms_norm(q, params[f"{at}.q_a_layernorm.weight"], config.latent_norm_eps)


def query(config: Config, params: Params, at: str, x: Tensor, rope: Pair) -> Pair:
    """q_nope [H, T, P], q_pe [H, T, R]."""
    if config.q_lora_rank is None:
        q = linear(params, f"{at}.q_proj", x)
    else:
        q = linear(params, f"{at}.q_b_proj", query_latent(config, params, at, x))
    q = q.view(len(x), config.num_attention_heads, -1).transpose(0, 1)
    q_nope, q_pe = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    return q_nope, rotate(config, q_pe, *rope)


def latent(config: Config, params: Params, at: str, x: Tensor, rope: Pair) -> Pair:
    """What a cache would hold: c [T, L] after its norm, and p [T, R], the key all heads share."""
    kv = linear(params, f"{at}.kv_a_proj_with_mqa", x)
    c, p = kv[:, : config.kv_lora_rank], kv[:, config.kv_lora_rank :]
    c = rms_norm(c, params[f"{at}.kv_a_layernorm.weight"], config.latent_norm_eps)
    return c, rotate(config, p, *rope)


def split_kv_b(config: Config, weight: Tensor) -> Pair:
    """kv_b_proj [H(P+V), L] -> W_UK [H, P, L], W_UV [H, V, L]; in each head the key rows first."""
    heads = weight.view(config.num_attention_heads, -1, config.kv_lora_rank)
    return heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]


def visible(count: int) -> Tensor:
    """[T, T], true where a key does not come later than the query; decided by the place in the
    sequence, not by `positions`."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def softmax_over(scores: Tensor, seen: Tensor) -> Tensor:
    """[H, T, T]; the keys that a query sees share all the weight."""
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)


def attend_expanded(config: Config, q: Pair, kv: Pair, w_kv_b: Pair, seen: Tensor) -> Tensor:
    """[H, T, V]. Every head gets its own keys and values out of the latent (as in prefill)."""
    (q_nope, q_pe), (c, p), (w_uk, w_uv) = q, kv, w_kv_b
    k_nope, v = c @ w_uk.mT, c @ w_uv.mT
    scores = (q_nope @ k_nope.mT + q_pe @ p.mT) * facts.softmax_scale(config)
    return softmax_over(scores, seen) @ v


def attend_absorbed(config: Config, q: Pair, kv: Pair, w_kv_b: Pair, seen: Tensor) -> Tensor:
    """[H, T, V]. Queries move into the latent space and read the cache as it is (as in decode)."""
    (q_nope, q_pe), (c, p), (w_uk, w_uv) = q, kv, w_kv_b
    q_latent = q_nope @ w_uk
    scores = (q_latent @ c.mT + q_pe @ p.mT) * facts.softmax_scale(config)
    return (softmax_over(scores, seen) @ c) @ w_uv.mT


def seen_keys(
    config: Config, params: Params, layer: int, x: Tensor, rope: Pair, selections: Selections
) -> Tensor:
    """[T, T]: the keys up to the query's own, or those of them that an indexer selects."""
    seen = visible(len(x))
    if config.indexer is None:
        return seen
    q_latent = query_latent(config, params, f"model.layers.{layer}.self_attn", x)
    chosen = indexer.select(config, params, layer, x, q_latent, rope, selections)
    return seen & indexer.kept(chosen, len(x))


def attention(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    rope: Pair,
    form: str,
    selections: Selections,
) -> Tensor:
    at = f"model.layers.{layer}.self_attn"
    q_nope, q_pe = query(config, params, at, x, rope)
    c, p = latent(config, params, at, x, rope)
    w_uk, w_uv = split_kv_b(config, params[f"{at}.kv_b_proj.weight"])
    attend = {"expanded": attend_expanded, "absorbed": attend_absorbed}[form]
    q, kv, w_kv_b = (wide(q_nope), wide(q_pe)), (wide(c), wide(p)), (wide(w_uk), wide(w_uv))
    seen = seen_keys(config, params, layer, x, rope, selections)
    heads = attend(config, q, kv, w_kv_b, seen).to(x.dtype)
    return linear(params, f"{at}.o_proj", heads.transpose(0, 1).flatten(1))


def router_scores(config: Config, x: Tensor, gate: Tensor) -> Tensor:
    """[T, E]."""
    logits = wide(x) @ wide(gate).T
    if config.scoring_func == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(dim=-1) if config.scoring_func == "softmax" else logits.sigmoid()


def group_scores(config: Config, choice: Tensor) -> Tensor:
    """[T, n_group]: V2 takes a group's best expert, the others the sum of its two best."""
    grouped = choice.view(len(choice), config.n_group, -1)
    return grouped.topk(1 if config.family == "deepseek_v2" else 2, dim=-1).values.sum(-1)


def limit_groups(config: Config, choice: Tensor) -> Tensor:
    """[T, E] with -inf outside the best groups.

    V2's own code writes 0 there. Softmax scores are positive, so the choice is the same as long
    as the kept groups hold K experts.
    """
    if config.n_group == 1:
        return choice
    kept = top_k(group_scores(config, choice), config.topk_group)
    excluded = torch.ones(len(choice), config.n_group, dtype=torch.bool).scatter(1, kept, False)
    size = choice.shape[1] // config.n_group
    return choice.masked_fill(excluded.repeat_interleave(size, dim=1), float("-inf"))


def choose_experts(config: Config, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Ids [T, K]. The correction bias takes part in the choice, and in nothing else."""
    choice = scores if bias is None else scores + bias
    return top_k(limit_groups(config, choice), config.num_experts_per_tok)


def expert_weights(config: Config, scores: Tensor, ids: Tensor) -> Tensor:
    """[T, K], from the scores without bias."""
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scaling_factor


def route(config: Config, x: Tensor, gate: Tensor, bias: Tensor | None) -> Pair:
    scores = router_scores(config, x, gate)
    ids = choose_experts(config, scores, bias)
    return ids, expert_weights(config, scores, ids)


def swiglu(params: Params, at: str, x: Tensor) -> Tensor:
    gate, up = linear(params, f"{at}.gate_proj", x), linear(params, f"{at}.up_proj", x)
    return linear(params, f"{at}.down_proj", torch.nn.functional.silu(gate) * up)


def routed_sum(
    params: Params, at: str, x: Tensor, routing: Pair, feed: Callable[[Params, str, Tensor], Tensor]
) -> Tensor:
    """What a token's experts give for it, by their weights; `feed` is what an expert does."""
    ids, weights = routing
    routed = wide(torch.zeros_like(x))
    for expert in sorted(set(ids.flatten().tolist())):
        row, slot = torch.where(ids == expert)
        y = feed(params, f"{at}.experts.{expert}", x[row])
        routed = routed.index_add(0, row, wide(y) * weights[row, slot, None])
    return routed.to(x.dtype)


def moe(
    config: Config, params: Params, layer: int, x: Tensor, trace: Trace, forced: Forced
) -> Tensor:
    at = f"model.layers.{layer}.mlp"
    bias = params.get(f"{at}.gate.e_score_correction_bias")
    gate = params[f"{at}.gate.weight"]
    ids, weights = route(config, x, gate, bias)
    if layer in forced:
        ids = forced[layer]
        weights = expert_weights(config, router_scores(config, x, gate), ids)
    if trace is not None:
        trace[layer] = ids
    routed = routed_sum(params, at, x, (ids, weights), swiglu)
    if config.n_shared_experts == 0:
        return routed
    return routed + swiglu(params, f"{at}.shared_experts", x)


def mixed(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    ropes: tuple[Pair, Pair | None],
    form: str,
    selections: Selections,
) -> Tensor:
    """What the first half of a layer adds, in which tokens hear of each other."""
    latent_rope, linear_rope = ropes
    if facts.layer_is_linear(config, layer):
        return lightning.attention(config, params, layer, x, linear_rope, form)
    return attention(config, params, layer, x, latent_rope, form, selections)


def fed(
    config: Config, params: Params, layer: int, x: Tensor, trace: Trace, forced: Forced
) -> Tensor:
    """What the second half adds: each token by itself."""
    if facts.layer_is_moe(config, layer):
        return moe(config, params, layer, x, trace, forced)
    return swiglu(params, f"model.layers.{layer}.mlp", x)


@dataclass
class Sequence:
    """Tokens on their way through the layers. `form` is what prefill does ("expanded": keys and
    values of latent layers expanded, linear layers in tiles) or what decode does ("absorbed":
    latent layers absorbed, linear layers token by token)."""

    tokens: Tensor
    places: Tensor
    form: str = "expanded"
    trace: Trace = None
    """Receives the experts that each layer chose."""
    forced: Forced = field(default_factory=dict)
    """Experts to take instead of choosing."""
    selections: Selections = field(default_factory=Selections)


class Reference:
    """`params` is a plain dict: set requires_grad on any of them, and gradients flow."""

    def __init__(self, config: Config, params: Params) -> None:
        self.config = config
        self.params = params

    def logits(
        self,
        tokens: Ints,
        positions: Ints | None = None,
        form: str = "expanded",
        trace: Trace = None,
        selected: dict[int, Tensor] | None = None,
        forced: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """[T, vocab]. `trace` receives the experts, `selected` the keys (see `Selections`) that
        each layer chose; a layer in `forced` sees these keys instead, and so do the layers that
        share its selection."""
        ids = torch.as_tensor(tokens)
        places = torch.arange(len(ids)) if positions is None else torch.as_tensor(positions)
        selections = Selections({} if selected is None else selected, forced or {})
        sequence = Sequence(ids, places, form, trace, {}, selections)
        h = self.start(ids)
        for layer in range(self.config.num_hidden_layers):
            y = self.mixed(layer, self.entry(layer, MIX, h), sequence)
            h = self.add(layer, MIX, h, y)
            y = self.fed(layer, self.entry(layer, FEED, h), sequence)
            h = self.add(layer, FEED, h, y)
        return self.head(h)

    # One step each, for whoever holds layers one by one against another computation.

    def start(self, tokens: Tensor) -> Tensor:
        """The residual before the first layer."""
        return self.params["model.embed_tokens.weight"][tokens]

    def entry(self, layer: int, half: Half, h: Tensor) -> Tensor:
        """[T, D]: the half's input, normed."""
        weight = self.params[f"model.layers.{layer}.{half.norm}.weight"]
        return rms_norm(h, weight, self.config.rms_norm_eps)

    def mixed(self, layer: int, x: Tensor, sequence: Sequence) -> Tensor:
        ropes = self.ropes(sequence.places, x.dtype)
        form, selections = sequence.form, sequence.selections
        return mixed(self.config, self.params, layer, x, ropes, form, selections)

    def fed(self, layer: int, x: Tensor, sequence: Sequence) -> Tensor:
        return fed(self.config, self.params, layer, x, sequence.trace, sequence.forced)

    def add(self, layer: int, half: Half, h: Tensor, y: Tensor) -> Tensor:
        """The residual behind the half, whose output is y."""
        return h + y

    def head(self, h: Tensor) -> Tensor:
        x = rms_norm(h, self.params["model.norm.weight"], self.config.rms_norm_eps)
        return linear(self.params, "lm_head", x)

    def ropes(
        self, positions: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Pair, Pair | None]:
        """Tables of latent and of linear layers, rounded to the model's dtype."""
        dtype = dtype or self.params["model.norm.weight"].dtype
        cos, sin = rope_table(self.config, positions)
        other = linear_rope_table(self.config, positions)
        rotated = other and (other[0].to(dtype), other[1].to(dtype))
        return (cos.to(dtype), sin.to(dtype)), rotated

    def logprobs(
        self,
        tokens: Ints,
        positions: Ints | None = None,
        form: str = "expanded",
        forced: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        return wide(self.logits(tokens, positions, form, forced=forced)).log_softmax(dim=-1)
