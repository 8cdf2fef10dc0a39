"""Experts and keys that an engine has chosen, held against the definition's scores: another choice
than its own is accepted only as far as noise can swap two scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.reference import Reference, compressor, deepseek_v4, indexer, model
from trueline.reference.functional import wide
from trueline.reference.indexer import NOTHING
from trueline.reference.model import Sequence
from trueline.reference.v4_facts import SPARSE


@dataclass(frozen=True)
class Scores:
    """What a layer chooses by, [T, candidates]; those that cannot be chosen are -inf."""

    values: Tensor
    size: Tensor
    """[T]: of a row's scores, which their errors are relative to."""
    groups: Tensor | None = None
    """[T, groups] of experts."""
    kept: int = 0
    """Groups that are."""


def expert_scores(ref: Reference, layer: int, x: Tensor) -> Scores | None:
    """None where the layer has no router that chooses."""
    config, at = ref.config, f"model.layers.{layer}.mlp.gate"
    gate = ref.params.get(f"{at}.weight")
    if gate is None or (config.v4 is not None and config.v4_facts.hashed[layer]):
        return None
    scores = model.router_scores(config, x, gate)
    bias = ref.params.get(f"{at}.e_score_correction_bias")
    values = scores if bias is None else scores + bias
    size = values.abs().amax(-1)
    if config.v4 is not None or config.n_group == 1:
        return Scores(values, size)
    return Scores(values, size, model.group_scores(config, values), config.topk_group)


def hashed_experts(ref: Reference, layer: int, tokens: Tensor) -> Tensor | None:
    table = ref.params.get(f"model.layers.{layer}.mlp.gate.tid2eid")
    return None if table is None else table[tokens]


def key_scores(ref: Reference, layer: int, x: Tensor, sequence: Sequence) -> Scores | None:
    """Of a layer that chooses among keys or entries by itself."""
    config, params, at = ref.config, ref.params, f"model.layers.{layer}.self_attn"
    if config.v4 is not None:
        if config.v4_facts.forms[layer] != SPARSE:
            return None
        rope = deepseek_v4.rope_table(config, layer, sequence.places)
        latent = deepseek_v4.query_latent(config, params, at, x)
        values = compressor.index_scores(config, params, layer, x, latent, rope)
        seen = compressor.visible_entries(len(x), config.v4_facts.ratios[layer])
    else:
        if config.indexer is None or config.indexer_facts.shared[layer]:
            return None
        rope = ref.ropes(sequence.places, x.dtype)[0]
        latent = model.query_latent(config, params, at, x)
        values = indexer.scores(config, params, layer, x, latent, rope)
        seen = model.visible(len(x))
    return Scores(values.masked_fill(~seen, float("-inf")), _size(values))


def _size(values: Tensor) -> Tensor:
    """Scores are sums with signs, so the largest of a row stands for what was added up."""
    return wide(values).abs().amax(-1)


def noise(rough: Scores, exact: Scores) -> float:
    """Largest error of a score, relative to its row's size."""
    off = (rough.values.double() - exact.values.double()).abs()
    off = off.where(exact.values.isfinite(), 0.0).amax(-1) / exact.size.clamp_min(1e-30)
    return float(off.max())


def wrong_choice(scores: Scores, ids: Tensor, accepted: float) -> Tensor:
    """[T]: by how much more than accepted (relative to the row's size) the best candidate that was
    left out beats the worst that was taken; at most 0 where the choice is right. A group that was
    left out, or taken, by noise takes its experts along."""
    values, size = scores.values, scores.size.clamp_min(1e-30)
    taken = torch.zeros(len(values), values.shape[1] + 1, dtype=torch.bool, device=values.device)
    taken.scatter_(1, ids.long().where(ids != NOTHING, values.shape[1]), True)
    taken = taken[:, :-1]
    values, near = _without_groups(scores, values, accepted)
    worst = values.masked_fill(~taken, float("inf")).amin(-1)
    best = values.masked_fill(taken, float("-inf")).amax(-1)
    margin = (best - worst) / size - 2 * accepted
    return margin.nan_to_num(float("inf"), float("inf"), float("-inf")).masked_fill(near, 0.0)


def _without_groups(scores: Scores, values: Tensor, accepted: float) -> tuple[Tensor, Tensor]:
    """Scores with those of groups that are not kept out; and rows in which two groups are so near
    that either may be."""
    nobody = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    if scores.groups is None:
        return values, nobody
    best = scores.groups.sort(-1, descending=True).values
    gap = best[:, scores.kept - 1] - best[:, scores.kept] if best.shape[1] > scores.kept else None
    near = nobody if gap is None else gap <= 4 * accepted * scores.size
    out = scores.groups < best[:, scores.kept - 1 : scores.kept]
    width = values.shape[1] // scores.groups.shape[1]
    return values.masked_fill(out.repeat_interleave(width, 1), float("-inf")), near


def counts_are_right(ids: Tensor, count: int | Tensor) -> Tensor:
    """[T]: each row has so many different candidates (those it can have)."""
    ordered = ids.sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NOTHING)).any(-1)
    return ~twice & ((ids != NOTHING).sum(-1) == count)


def all_visible(count: int, width: int, ratio: int, chosen: Mapping[int, Tensor]) -> Tensor:
    """[count, width], on the host: what each position has chosen, or all that it sees where that is
    no more."""
    rows = torch.full((count, width), NOTHING, device="cpu")
    for p in range(count):
        mine = chosen.get(p)
        seen = min((p + 1) // ratio, width)
        if mine is None:
            rows[p, :seen] = torch.arange(seen, device="cpu")
        else:
            rows[p, : len(mine)] = mine[:width]
    return rows
