"""What follows the mixer in a layer: a dense MLP, or a router and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trueline.spec.source import Span, Spec

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["max", "top2_sum"]


@dataclass(frozen=True, kw_only=True)
class DenseSpec(Spec):
    """down(silu(gate x) × up x), no bias."""

    label: ClassVar[str] = "dense"

    width: Span


@dataclass(frozen=True, kw_only=True)
class RouterSpec(Spec):
    """In this order, float32 throughout: score, add the correction bias (for choosing only), keep
    the best groups, take top_k, gather the *scores*, renormalise, multiply by scaling_factor.
    Ties go to the lowest expert index."""

    scoring: Scoring
    correction_bias: bool
    num_groups: int
    top_groups: int
    group_score: GroupScore | None
    """How groups compete; None where there is one group or the method ignores groups."""
    top_k: int
    renormalise: bool
    scaling_factor: float
    hashed: bool = False
    """DeepSeek-V4's first layers: experts come from a table of token ids."""


@dataclass(frozen=True, kw_only=True)
class MoESpec(Spec):
    label: ClassVar[str] = "moe"

    experts: Span
    """`total` experts compete in the router; this rank holds `start:stop` of them."""
    expert_width: Span
    """Of each routed expert. Ranks divide the experts or this, never both."""
    shared_width: Span | None
    """The shared expert: ungated, added as it is, never times scaling_factor."""
    router: RouterSpec
    swiglu_limit: float | None = None


FeedForwardSpec = DenseSpec | MoESpec
