"""The full tier: the model with one option changed at a time. Caches in other dtypes and layouts,
other sizes of blocks, batch-invariant mode, and each op by every other implementation that runs
here, in the place where the model uses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trueline.cache.kinds.entries import EntriesIndex
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.window import Window
from trueline.cache.layout import INDEX_LAYOUTS
from trueline.errors import RequestRejected, UsageError
from trueline.ops.registry import OPS
from trueline.utils.json_types import JSON
from trueline.verify.suite import compositions
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.numbers import Numbers, judged_layers, judged_mode
from trueline.verify.suite.ops import runs_here
from trueline.verify.suite.outcome import Outcome, Todo, Wrong
from trueline.verify.suite.session import Session

BLOCK_SIZES = (1, 16, 64)
FORCED = ("decode", "mixed step", "prefix hit")
"""Beside one request alone."""
FP8 = "e4m3fn"
SEVERAL_GROUPS = 64
"""Positions of a block in which a shuffled layout has more than one group of tokens."""


@dataclass(frozen=True)
class Variant:
    name: str
    """As it is given on a command line."""
    changes: JSON


def variants(session: Session) -> Iterator[Variant]:
    config, plan = session.config, session.plan
    yield Variant("--batch-invariant", {"batch_invariant": True})
    for size in BLOCK_SIZES:
        if size != plan.block_size:
            yield Variant(f"--block-size {size}", {"block_size": size})
    if config.kv_cache_dtype == "auto" and (plan.kind(Latent) or plan.kind(Window)):
        yield Variant("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"})
    if plan.kind(IndexKeys) or plan.kind(EntriesIndex):
        size = max(plan.block_size, SEVERAL_GROUPS)
        for layout in INDEX_LAYOUTS:
            yield Variant(
                f"--index-cache-dtype {FP8} --index-cache-layout {layout} --block-size {size}",
                {"index_cache_dtype": FP8, "index_cache_layout": layout, "block_size": size},
            )
    for op, chosen in plan.selections.items():
        for name in dict.fromkeys(("reference", *OPS[op])):
            if name != chosen.name and runs_here(session, op, name):
                yield Variant(f"--op {op}={name}", {"ops": {**config.ops, op: name}})


def checks(session: Session) -> Iterator[Todo]:
    if session.in_processes:
        return  # each would start its ranks several times
    for variant in variants(session):
        yield Todo(
            f"variants/{variant.name}",
            "any options",
            f"the layers, decode, a mixed step and a prefix hit with {variant.name}",
            lambda variant=variant: _run(session, variant),  # type: ignore[misc]
        )


def _run(session: Session, variant: Variant) -> Outcome:
    try:
        config = replace(session.config, **variant.changes)
        changed = Session(session.name, session.model, config, session.prompt, session.seed)
    except (UsageError, RequestRejected) as error:
        raise NotForced(f"the engine refuses it: {error}") from error
    numbers = Numbers(changed)
    if numbers.session.definition.room is not None:
        raise NotForced(f"layers are read one at a time here: trueline verify … {variant.name}")
    first, *others = compositions.compositions(changed)
    some = [each for each in others if each.name in FORCED]
    try:
        outcome = judged_layers(numbers, first)
        told = [outcome.evidence, *(judged_mode(numbers, each).evidence for each in some)]
    except Wrong as wrong:
        again = f"{wrong}; by itself: trueline verify {session.name} {variant.name}"
        raise Wrong(again, wrong.place, wrong.measures) from wrong
    return replace(outcome, evidence="; ".join(told))
