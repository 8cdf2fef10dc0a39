"""The memory that canaries guard: blocks of each group of kinds, slots, and what stays as it is for
ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from trueline.cache.kinds import AnyKind
from trueline.cache.parts import Guarded, Part
from trueline.engine.caches import Caches
from trueline.engine.canaries.claims import Claims, claimed_blocks, claimed_slots
from trueline.engine.canaries.places import Places
from trueline.engine.canaries.sums import Sums
from trueline.engine.messages import StepMessage
from trueline.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Kept:
    """One part of what a kind keeps."""

    kind: AnyKind
    sums: Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: str
    noun: str
    """block, slot or row."""
    group: int | None
    """Of its blocks' tables."""
    places: Places
    kept: Sequence[Kept]
    claims: Callable[[StepMessage], Claims]
    """What a step may write here."""


Parts = list[tuple[AnyKind, Part]]


def find_pools(plan: Plan, caches: Caches, *, padded: bool) -> list[Pool]:
    """Blocks of each group and slots have equal shares of what a check may look at."""
    found = list(_pools(plan, _parts(plan, caches)))
    assert plan.canaries is not None
    share = plan.canaries.check_bytes // (len(plan.groups) + bool(plan.slots))
    return [_pool(*each, share=share, padded=padded) for each in found]


def _parts(plan: Plan, caches: Caches) -> Parts:
    stores = ((kind, caches.store(kind)) for kind in plan.kinds)
    return [
        (kind, part)
        for kind, store in stores
        if isinstance(store, Guarded)
        for part in store.parts()
    ]


def _pools(
    plan: Plan, parts: Parts
) -> Iterator[tuple[str, str, int | None, int, Parts, Callable[[StepMessage], Claims]]]:
    """Name, noun, group, positions of a place, parts, claims."""
    by_group = [
        (number, group.block_size, {kind.name for kind in group.kinds})
        for number, group in enumerate(plan.groups)
    ]
    for number, size, names in by_group:
        held = [each for each in parts if each[0].name in names and not each[1].constant]
        if held:
            claims = partial(claimed_blocks, group=number, size=size)
            yield "+".join(sorted(names)), "block", number, size, held, claims
    slotted = {kind.name for kind in plan.slotted}
    held = [each for each in parts if each[0].name in slotted]
    if held:
        yield "slots", "slot", None, 1, held, claimed_slots
    for kind, part in parts:
        if part.constant:
            yield f"{kind.name}, {part.name}", "row", None, 1, [(kind, part)], lambda step: Claims()


def _pool(
    name: str,
    noun: str,
    group: int | None,
    positions: int,
    parts: Parts,
    claims: Callable[[StepMessage], Claims],
    *,
    share: int,
    padded: bool,
) -> Pool:
    kept = [Kept(kind, Sums(part, positions)) for kind, part in parts]
    most = share // sum(each.sums.place_bytes for each in kept)
    count = parts[0][1].num_places
    places = Places(count, positions, most, padded=padded and noun != "row")
    return Pool(name=name, noun=noun, group=group, places=places, kept=kept, claims=claims)
