"""Hyper-connections of DeepSeek V4: the residual is S streams [T, S, D], which start as copies of
the embedding. Before each sub-layer a token's own streams say how they are weighed for its input,
how its output is added to each of them, and how they are carried into each other. In float32 at
least.
"""

import torch
from torch import Tensor

from trueline.reference.config import Config
from trueline.reference.functional import Params, unit_rms, wide


def projected(config: Config, params: Params, at: str, h: Tensor) -> Tensor:
    """All streams of a token, side by side, normalised together."""
    return unit_rms(h.flatten(1), config.rms_norm_eps) @ wide(params[f"{at}.fn"]).T


def coefficients(
    config: Config, params: Params, at: str, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, S], post [T, S], carry [T, S, S]."""
    facts, streams = config.v4_facts, config.v4_facts.hc_mult
    sizes = [streams, streams, streams * streams]
    pre, post, carry = torch.split(projected(config, params, at, h), sizes, -1)
    pre_base, post_base, carry_base = torch.split(wide(params[f"{at}.base"]), sizes)
    pre_scale, post_scale, carry_scale = wide(params[f"{at}.scale"])
    logits = (carry * carry_scale + carry_base).view(len(h), streams, streams)
    return (
        (pre * pre_scale + pre_base).sigmoid() + facts.hc_eps,
        2 * (post * post_scale + post_base).sigmoid(),
        sinkhorn(logits, facts.hc_sinkhorn_iters, facts.hc_eps),
    )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows, then columns, that often; the first rows by softmax. Columns sum to 1 in the end, rows
    nearly."""
    carry = logits.softmax(dim=-1) + eps
    carry = carry / (carry.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        carry = carry / (carry.sum(-1, keepdim=True) + eps)
        carry = carry / (carry.sum(-2, keepdim=True) + eps)
    return carry


def gathered(h: Tensor, pre: Tensor) -> Tensor:
    """[T, D]: a sub-layer's input."""
    return (pre[:, :, None] * wide(h)).sum(1).to(h.dtype)


def merged(h: Tensor, y: Tensor, post: Tensor, carry: Tensor) -> Tensor:
    """Stream k becomes post_k y + sum_j carry[j, k] h_j."""
    added = post[:, :, None] * wide(y)[:, None]
    return (added + torch.einsum("tjk,tjd->tkd", carry, wide(h))).to(h.dtype)


def head(config: Config, params: Params, h: Tensor) -> Tensor:
    """[T, D] behind the last layer: weighed like a sub-layer's input, nothing is carried on."""
    at = "model.hc_head"
    m = projected(config, params, at, h) * wide(params[f"{at}.scale"]) + wide(params[f"{at}.base"])
    return gathered(h, m.sigmoid() + config.v4_facts.hc_eps)
