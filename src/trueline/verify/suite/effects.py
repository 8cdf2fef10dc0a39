"""What the plan of an engine states of its options: one that is taken and then not looked at
changes nothing, and no comparison of numbers would tell. How caches store: stored_as.py."""

from __future__ import annotations

from trueline.cache.kinds.window import Window
from trueline.config import EngineConfig
from trueline.plan.plan import Plan

AUTO = "auto"
"""Stands for a value that depends on the model."""


def stated(plan: Plan) -> dict[str, object]:
    """By option."""
    found: dict[str, object] = {
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "num_gpu_blocks_override": plan.num_blocks - 1,
        "batch_invariant": plan.batch_invariant,
        "overlap": plan.limits.overlap,
        "numerics": plan.numerics.name,
    }
    if plan.kind(Window) is None:  # whose blocks hold whole windows
        found["block_size"] = plan.block_size
    if plan.canaries is not None:
        found["canary_interval"] = plan.canaries.interval
    if plan.slots is not None:
        found["num_state_slots"] = plan.slots.num_slots - 1
        found["snapshot_spacing"] = plan.slots.spacing
    return found


def not_applied(config: EngineConfig, given: list[str], plan: Plan) -> list[str]:
    """Of the options that were given, those of which the plan states something else."""
    found, wrong = stated(plan), []
    for name in given:
        asked = getattr(config, name)
        if name in found and asked != AUTO and found[name] != asked:
            wrong.append(f"{name} = {asked!r} was given, and the plan has {found[name]}")
    for op, name in config.ops.items():
        chosen = plan.selections.get(op)
        if chosen is not None and chosen.name != name:
            wrong.append(f"op {op}={name} was given, and the plan has {chosen.name}")
    return wrong
