"""The DeepSeek line, sparse or not, and Ling with its linear layers, as an executable definition:
full sequence, no cache, one function a step.

Letters: T tokens, D hidden, H heads, P/R/V widths of the plain, rotated and value part of a head,
L latent, E experts, K chosen experts. Weights are [out, in], under their published names. Tests
replace these functions one by one to seed faults, so each step is called by its module name.
"""

from collections.abc import Callable, Mapping, Sequence

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

Ints = Sequence[int] | Tensor
Trace = dict[int, Tensor] | None  # layer -> expert ids [T, K]


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


def moe(config: Config, params: Params, layer: int, x: Tensor, trace: Trace) -> Tensor:
    at = f"model.layers.{layer}.mlp"
    bias = params.get(f"{at}.gate.e_score_correction_bias")
    ids, weights = route(config, x, params[f"{at}.gate.weight"], bias)
    if trace is not None:
        trace[layer] = ids
    routed = routed_sum(params, at, x, (ids, weights), swiglu)
    if config.n_shared_experts == 0:
        return routed
    return routed + swiglu(params, f"{at}.shared_experts", x)


def mix(
    config: Config,
    params: Params,
    layer: int,
    h: Tensor,
    ropes: tuple[Pair, Pair | None],
    form: str,
    selections: Selections,
) -> Tensor:
    """The first half of a layer: tokens hear of each other."""
    weight = params[f"model.layers.{layer}.input_layernorm.weight"]
    x = rms_norm(h, weight, config.rms_norm_eps)
    latent_rope, linear_rope = ropes
    if facts.layer_is_linear(config, layer):
        return h + lightning.attention(config, params, layer, x, linear_rope, form)
    return h + attention(config, params, layer, x, latent_rope, form, selections)


def feed_forward(config: Config, params: Params, layer: int, h: Tensor, trace: Trace) -> Tensor:
    """The second half: each token by itself."""
    at = f"model.layers.{layer}"
    x = rms_norm(h, params[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
    if facts.layer_is_moe(config, layer):
        return h + moe(config, params, layer, x, trace)
    return h + swiglu(params, f"{at}.mlp", x)


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
        """[T, vocab]. `form` is what prefill does ("expanded": keys and values of latent layers
        expanded, linear layers in tiles) or what decode does ("absorbed": latent layers absorbed,
        linear layers token by token). `trace` receives the experts, `selected` the keys (see
        `Selections`) that each layer chose; a layer in `forced` sees these keys instead, and
        so do the layers that share its selection."""
        config, params, ids = self.config, self.params, torch.as_tensor(tokens)
        places = torch.arange(len(ids)) if positions is None else torch.as_tensor(positions)
        h = params["model.embed_tokens.weight"][ids]
        ropes = self.ropes(places)
        selections = Selections({} if selected is None else selected, forced or {})
        for layer in range(config.num_hidden_layers):
            h = mix(config, params, layer, h, ropes, form, selections)
            h = feed_forward(config, params, layer, h, trace)
        return linear(
            params, "lm_head", rms_norm(h, params["model.norm.weight"], config.rms_norm_eps)
        )

    def ropes(self, positions: Tensor) -> tuple[Pair, Pair | None]:
        """Tables of latent and of linear layers, rounded to the model's dtype."""
        dtype = self.params["model.norm.weight"].dtype
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
