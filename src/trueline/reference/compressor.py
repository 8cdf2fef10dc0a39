"""Compressed entries of DeepSeek V4, and the indexer that selects among them. Letters as in
`model.py`, with N entries and I index heads.

An entry pools the tokens of a window of `ratio` places, in sparse layers those of the window before
too: sum_j softmax_j(z_j + bias_j) u_j, a softmax for each channel. It stands at the position of its
window's first token, and is seen from the token on that completes the window.
"""

import torch
from torch import Tensor

from trueline.errors import UsageError
from trueline.reference import published
from trueline.reference.config import Config
from trueline.reference.functional import (
    Pair,
    Params,
    linear,
    rms_norm_rounded_once,
    rotate_last,
    top_k,
    wide,
)
from trueline.reference.indexer import NOTHING, Selections
from trueline.reference.v4_facts import SPARSE


def windows(x: Tensor, ratio: int) -> Tensor:
    """[N, ratio, d] of [T, d]: an unfinished window has no entry."""
    count = len(x) // ratio
    return x[: count * ratio].view(count, ratio, x.shape[-1])


def with_window_before(x: Tensor, nothing: float) -> Tensor:
    """[N, 2 ratio, d] of [N, ratio, 2d]: the window before through the first half of its channels,
    then the window itself through the second. Before the first there is `nothing`."""
    first, second = x.chunk(2, dim=-1)
    before = torch.cat((torch.full_like(first[:1], nothing), first[:-1]))
    return torch.cat((before, second), dim=1)


def pooled(params: Params, at: str, x: Tensor, ratio: int, overlap: bool) -> Tensor:
    """[N, d], in float32 at least."""
    u = windows(wide(x) @ wide(params[f"{at}.kv_proj.weight"]).T, ratio)
    z = windows(wide(x) @ wide(params[f"{at}.gate_proj.weight"]).T, ratio)
    z = z + wide(params[f"{at}.position_bias"])
    if overlap:
        u, z = with_window_before(u, 0.0), with_window_before(z, float("-inf"))
    return (z.softmax(dim=1) * u).sum(1)


def entries(config: Config, params: Params, layer: int, at: str, x: Tensor, rope: Pair) -> Tensor:
    """[N, d]: normalised and rotated; `rope` is the table of the tokens."""
    facts = config.v4_facts
    ratio = facts.ratios[layer]
    e = pooled(params, at, x, ratio, overlap=facts.forms[layer] == SPARSE).to(x.dtype)
    e = rms_norm_rounded_once(e, params[f"{at}.norm.weight"], config.rms_norm_eps)
    cos, sin = (windows(table, ratio)[:, 0] for table in rope)
    return rotate_last(e, (cos, sin))


def visible_entries(count: int, ratio: int) -> Tensor:
    """[T, N], by the place in the sequence."""
    complete = (torch.arange(count) + 1) // ratio
    return torch.arange(count // ratio) < complete[:, None]


def scale(config: Config) -> float:
    return float(config.v4_facts.index_head_dim**-0.5)


def head_weight(config: Config) -> float:
    return float(config.v4_facts.index_n_heads**-0.5)


def index_queries(config: Config, params: Params, at: str, q_latent: Tensor, rope: Pair) -> Tensor:
    """[T, I, d], from the normalised latent of the attention's queries."""
    q = linear(params, f"{at}.q_b_proj", q_latent)
    q = q.view(len(q), config.v4_facts.index_n_heads, -1)
    return published.index_row(params, rotate_last(q, rope))


def index_scores(
    config: Config, params: Params, layer: int, x: Tensor, q_latent: Tensor, rope: Pair
) -> Tensor:
    """[T, N], in float32 at least, also of entries that are not complete yet."""
    at = f"model.layers.{layer}.self_attn.indexer"
    q = wide(index_queries(config, params, at, q_latent, rope))
    keys = entries(config, params, layer, f"{at}.compressor", x, rope)
    k = wide(published.index_row(params, keys))
    weights = wide(x) @ wide(params[f"{at}.weights_proj.weight"]).T * head_weight(config)
    return (weights[:, :, None] * (q @ k.T * scale(config)).relu()).sum(1)


def largest(scores: Tensor, seen: Tensor, topk: int) -> Tensor:
    """[T, topk]: each row's best of those seen; of equal scores the lowest entry wins."""
    best = top_k(scores.masked_fill(~seen, float("-inf")), topk)
    best = best.masked_fill(~seen.gather(1, best), NOTHING)
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
    """[T, N], true where the layer's query sees an entry; the selection is written down."""
    seen = visible_entries(len(x), config.v4_facts.ratios[layer])
    if layer in selections.forced:
        chosen = selections.forced[layer]
    else:
        scores = index_scores(config, params, layer, x, q_latent, rope)
        chosen = largest(scores, seen, config.v4_facts.index_topk)
    selections.made[layer] = chosen
    return kept(chosen, seen)


def kept(chosen: Tensor, seen: Tensor) -> Tensor:
    """[T, N] of [T, k] entries."""
    count, entry_count = seen.shape
    complete = seen.sum(1, keepdim=True)
    if len(chosen) != count or bool(((chosen >= complete) | (chosen < NOTHING)).any()):
        raise UsageError(
            f"a selection of {list(chosen.shape)} for {count} tokens; accepted: for each token "
            f"entries that are complete there, or {NOTHING} for nothing"
        )
    # one column more, for what is nothing
    found = torch.zeros(count, entry_count + 1, dtype=torch.bool)
    return found.scatter(1, chosen.where(chosen != NOTHING, entry_count), True)[:, :entry_count]
