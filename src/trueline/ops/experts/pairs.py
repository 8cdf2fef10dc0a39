# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""A pair is a token and one of its slots: TOP routed experts, then SHARED that every token takes
with weight 1, which stand behind the routed ones in the weights. Pair = token × slots + slot."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_of(ids, pair, live, first, held, TOP: tl.constexpr, SHARED: tl.constexpr):
    """Where a pair's expert stands in the weights; -1 for one that another rank holds."""
    slot = pair % (TOP + SHARED)
    if TOP == 0:
        return slot
    place = (pair // (TOP + SHARED)) * TOP + slot
    routed = tl.load(ids + place, mask=live & (slot < TOP), other=-1).to(tl.int32) - first
    here = (routed >= 0) & (routed < held) & live
    return tl.where(here & (slot < TOP), routed, tl.where(slot < TOP, -1, held + slot - TOP))


@triton.jit
def weight_of(weights, pair, live, TOP: tl.constexpr, SHARED: tl.constexpr):
    slot = pair % (TOP + SHARED)
    place = (pair // (TOP + SHARED)) * TOP + slot
    return tl.load(weights + place, mask=live & (slot < TOP), other=1.0)
