"""Linear attention of Ling 2.5 and 2.6, in two forms that share nothing but their inputs: one token
after the other, and in tiles. Letters as in `model.py`, with d channels a head.

For each head, with decay λ = exp(-slope): S_t = λ S_(t-1) + k_tᵀ v_t and o_t = q_t S_t, so that a
token reads what it has just written.
"""

import torch
from torch import Tensor

from trueline.reference import bailing
from trueline.reference.config import Config
from trueline.reference.functional import Pair, Params, linear, rms_norm, rotate_half_split, wide

TILE = 16  # any size gives the same numbers; this one puts several into a short prompt


def split_qkv(config: Config, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, 3Hd] -> q, k, v [T, H, d]: the rows of all heads' q, then of k, then of v."""
    q, k, v = rows.view(len(rows), 3, config.num_attention_heads, -1).unbind(1)
    return q, k, v


def rotate_first(x: Tensor, rope: Pair | None) -> Tensor:
    """[T, H, d]: as many of the first channels as the table is wide for, the rest as they are."""
    if rope is None:
        return x
    cos, sin = (table[:, None] for table in rope)
    width = 2 * cos.shape[-1]
    return torch.cat((rotate_half_split(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def project(
    config: Config, params: Params, at: str, x: Tensor, rope: Pair | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [H, T, d], q scaled."""
    facts = config.linear_facts
    rows = linear(params, f"{at}.query_key_value", x)
    if facts.silu:
        rows = torch.nn.functional.silu(rows)
    q, k, v = split_qkv(config, rows)
    if facts.use_qk_norm:
        q = rms_norm(q, params[f"{at}.query_layernorm.weight"], config.rms_norm_eps)
        k = rms_norm(k, params[f"{at}.key_layernorm.weight"], config.rms_norm_eps)
    q, k = rotate_first(q, rope), rotate_first(k, rope)
    q, k, v = (wide(each).transpose(0, 1) for each in (q, k, v))
    return q * scale(config), k, v


def scale(config: Config) -> float:
    """Of the linear layers; YaRN has no part in it."""
    return float(config.linear_facts.head_dim**-0.5)


def decay(slopes: Tensor, steps: Tensor) -> Tensor:
    """λ^steps per head: [H, *steps]. Steps are never negative, so nothing overflows."""
    return torch.exp(-slopes.view(-1, *[1] * steps.dim()) * steps)


def attend_recurrent(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """[H, T, d], token by token (as in decode)."""
    state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
    keep = decay(slopes, torch.ones(1, 1))
    out = []
    for t in range(q.shape[1]):
        state = keep * state + k[:, t, :, None] * v[:, t, None, :]
        out.append((q[:, t, None, :] @ state)[:, 0])
    return torch.stack(out, dim=1)


def carried_decay(slopes: Tensor, count: int) -> Tensor:
    """[H, count]: what a tile's tokens see of the state before it; the first already one decay."""
    return decay(slopes, torch.arange(1, count + 1))


def attend_tiled(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, tile: int = TILE) -> Tensor:
    """[H, T, d], a tile at a time (as in prefill): tokens of a tile see each other directly, and
    what was before through the state. Only powers of the distance between two tokens appear."""
    state = q.new_zeros(q.shape[0], k.shape[-1], v.shape[-1])
    out = []
    for start in range(0, q.shape[1], tile):
        qt, kt, vt = (each[:, start : start + tile] for each in (q, k, v))
        count = qt.shape[1]
        place = torch.arange(count)
        distance = place[:, None] - place
        near = decay(slopes, distance.clamp_min(0)) * (distance >= 0)
        inside = ((qt @ kt.mT) * near) @ vt
        out.append(inside + carried_decay(slopes, count)[..., None] * (qt @ state))
        left = decay(slopes, count - 1 - place)[..., None]
        state = decay(slopes, torch.tensor([[count]])) * state + (kt * left).mT @ vt
    return torch.cat(out, dim=1)


def attend(
    config: Config, params: Params, layer: int, x: Tensor, rope: Pair | None, form: str
) -> Tensor:
    """[T, Hd], before the output norm. `form` as for latent layers: what prefill does is tiled,
    what decode does is recurrent."""
    q, k, v = project(config, params, f"model.layers.{layer}.self_attn", x, rope)
    per_head = bailing.slopes(
        config.linear_facts, config.num_attention_heads, config.num_hidden_layers, layer
    )
    run = {"expanded": attend_tiled, "absorbed": attend_recurrent}[form]
    heads = run(q, k, v, torch.tensor(per_head, dtype=q.dtype))
    return heads.transpose(0, 1).flatten(1).to(x.dtype)


def group_norm(config: Config, x: Tensor, weight: Tensor) -> Tensor:
    """Each of group_norm_size runs of channels is normed by itself."""
    groups = config.linear_facts.group_norm_size
    normed = rms_norm(x.view(len(x), groups, -1), weight.view(groups, -1), config.rms_norm_eps)
    return normed.flatten(1)


def gated(config: Config, params: Params, layer: int, heads: Tensor, x: Tensor) -> Tensor:
    at = f"model.layers.{layer}.self_attn"
    normed = group_norm(config, heads, params[f"{at}.g_norm.weight"])
    return linear(params, f"{at}.o_proj", normed * linear(params, f"{at}.g_proj", x).sigmoid())


def attention(
    config: Config, params: Params, layer: int, x: Tensor, rope: Pair | None, form: str
) -> Tensor:
    """`x` is the layer's normalised input, for the gate as well."""
    return gated(config, params, layer, attend(config, params, layer, x, rope, form), x)
