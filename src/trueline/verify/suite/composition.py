"""A composition: requests that force what a batch can be, and what came of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from trueline.engine.core import EngineCore
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask, EngineRun
from trueline.verify.suite.judgement import Requests

Tier = Literal["smoke", "standard", "full"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass
class Ran:
    """A composition, run."""

    core: EngineCore
    done: EngineRun
    requests: Requests
    prompts: list[int]
    """Their lengths."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each step: decode rows, prefill rows, tokens."""
    step_seconds: float = 0.0
    """Of a step, the median."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    name: str
    invariant: str
    what: str
    asks: list[Ask]
    forced: Callable[[Ran], str]
    """What shows that it happened; raises NotForced where it did not."""
    changes: JSON = field(default_factory=dict)
    """Of the engine's options."""
    same_bits: JSON | None = None
    """Changes under which a second run must have the same bits, since its steps are the same."""
    alone: int | None = None
    """A request that must have the same bits without the others."""
    captured: bool = False
    """Decode steps are captured: nothing inside of them can be watched."""
    abort: dict[int, int] = field(default_factory=dict)
    """Request -> step before which it is aborted."""
    turned_over: bool = False
    """Whether other requests have used the cache up several times before."""
    ranks: int = 1
    """Threads of this process that share the model."""
    expert_parallel: bool = False
    same_on_one: bool = False
    """Whether one rank must have the same bits."""
    highest: bool = False
    """Requests get the last blocks of a cache as large as the user's own."""
    small_parts: bool = False
    """What a long context is computed in, short ones are too."""
    unjudged: str = ""
    """Why what it computes cannot be judged here; then it does not run."""
    tier: Tier = "standard"
    """The first that has it."""
