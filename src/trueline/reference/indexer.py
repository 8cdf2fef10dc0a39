"""The indexer of DeepSeek-V3.2 and GLM-5: which keys a query sees. Letters as in `model.py`, with I
index heads of d channels.

score[t, s] = Σ_i w[t, i] I^-0.5 · relu(d^-0.5 q[t, i]·k[s]). The largest of s <= t are kept, and
the softmax of latent attention runs over them alone. Scores choose, and do nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trueline.errors import UsageError
from trueline.reference import dsa
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rotate_half_split,
    rotate_interleaved,
    top_k,
    wide,
)

NOTHING = -1  # fills a row that has fewer keys than it may select


@dataclass
class Selections:
    """What each layer's queries see: layer -> [T, topk] places in the sequence (not `positions`),
    best first, NOTHING where there are fewer."""

    made: dict[int, Tensor] = field(default_factory=dict)
    forced: Mapping[int, Tensor] = field(default_factory=dict)


def scale(config: Config) -> float:
    """YaRN has no part in it, though the table that rotates q and k is that of the attention."""
    return float(config.indexer_facts.index_head_dim**-0.5)


def head_weight(config: Config) -> float:
    return float(config.indexer_facts.index_n_heads**-0.5)


def rotate_first(config: Config, x: Tensor, rope: Pair) -> Tensor:
    """[T, ..., d]: as many of the first channels as the table is wide for."""
    cos, sin = (table.view(len(x), *[1] * (x.dim() - 2), -1) for table in rope)
    width = 2 * cos.shape[-1]
    rotate = rotate_interleaved if config.indexer_facts.interleaved else rotate_half_split
    return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = wide(x)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + dsa.KEY_NORM_EPS)
    return (y * wide(weight) + wide(bias)).to(x.dtype)


def queries(config: Config, params: Params, at: str, q_latent: Tensor, rope: Pair) -> Tensor:
    """[T, I, d], from the *normalised* latent of the attention's queries."""
    q = linear(params, f"{at}.wq_b", q_latent)
    return rotate_first(config, q.view(len(q), config.indexer_facts.index_n_heads, -1), rope)


def keys(config: Config, params: Params, at: str, x: Tensor, rope: Pair) -> Tensor:
    """[T, d]: what a cache would hold, one a token for all heads."""
    k = linear(params, f"{at}.wk", x)
    k = layer_norm(k, params[f"{at}.k_norm.weight"], params[f"{at}.k_norm.bias"])
    return rotate_first(config, k, rope)


def head_weights(config: Config, params: Params, at: str, x: Tensor) -> Tensor:
    """[T, I]; may be negative, and so may scores."""
    return wide(x) @ wide(params[f"{at}.weights_proj.weight"]).T * head_weight(config)


def scores(
    config: Config, params: Params, layer: int, x: Tensor, q_latent: Tensor, rope: Pair
) -> Tensor:
    """[T, T], in float32 at least, also of keys that come later."""
    at = f"model.layers.{layer}.self_attn.indexer"
    q = wide(queries(config, params, at, q_latent, rope))
    k = wide(keys(config, params, at, x, rope))
    per_head = (q @ k.T * scale(config)).relu()
    return (head_weights(config, params, at, x)[:, :, None] * per_head).sum(1)


def largest(values: Tensor, topk: int) -> Tensor:
    """[T, topk] of [T, T]: each row's best among itself and those before; of equal scores the
    lowest place wins."""
    count = len(values)
    place = torch.arange(count)
    later = place > place[:, None]
    best = top_k(values.masked_fill(later, float("-inf")), min(topk, count))
    best = best.masked_fill(best > place[:, None], NOTHING)
    return torch.nn.functional.pad(best, (0, topk - best.shape[1]), value=NOTHING)


def select(
    config: Config,
    params: Params,
    layer: int,
    x: Tensor,
    q_latent: Tensor,
    rope: Pair,
    selections: Selections,
) -> Tensor:
    """This layer's selection, written down."""
    if layer in selections.forced:
        chosen = selections.forced[layer]
    elif config.indexer_facts.shared[layer]:
        chosen = selections.made[layer - 1]
    else:
        values = scores(config, params, layer, x, q_latent, rope)
        chosen = largest(values, config.indexer_facts.index_topk)
    selections.made[layer] = chosen
    return chosen


def kept(chosen: Tensor, count: int) -> Tensor:
    """[T, T], true where a key is selected."""
    place = torch.arange(count)[:, None]
    if len(chosen) != count or bool((chosen > place).any()) or bool((chosen < NOTHING).any()):
        raise UsageError(
            f"a selection of {list(chosen.shape)} for {count} tokens; accepted: for each token "
            f"places from 0 to its own, or {NOTHING} for nothing"
        )
    # one column more, for what is nothing
    seen = torch.zeros(count, count + 1, dtype=torch.bool)
    return seen.scatter(1, chosen.where(chosen != NOTHING, count), True)[:, :count]
