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
    """Blocks of each group and slots have equal shares of what a check may look at. `padded`:
    padded rows write the null place's first position."""
    assert plan.canaries is not None
    share = plan.canaries.check_bytes // (len(plan.groups) + bool(plan.slots))
    held = _held(plan, caches)
    return [
        *_blocks(plan, held, share, int(padded)),
        *_slots(plan, held, share, int(padded)),
        *_constants(held),
    ]


def _held(plan: Plan, caches: Caches) -> Parts:
    stores = ((kind, caches.store(kind)) for kind in plan.kinds)
    return [
        (kind, part)
        for kind, store in stores
        if isinstance(store, Guarded)
        for part in store.parts()
    ]


def _blocks(plan: Plan, held: Parts, share: int, padded: int) -> Iterator[Pool]:
    for number, group in enumerate(plan.groups):
        names = sorted(kind.name for kind in group.kinds)
        kept = _kept(held, names, group.block_size)
        if kept:
            scribbled = group.block_size if group.keeps_ends else padded
            yield Pool(
                name="+".join(names),
                noun="block",
                group=number,
                places=_places(kept, group.block_size, share, scribbled),
                kept=kept,
                claims=partial(
                    claimed_blocks,
                    group=number,
                    size=group.block_size,
                    keeps_ends=group.keeps_ends,
                ),
            )


def _slots(plan: Plan, held: Parts, share: int, padded: int) -> Iterator[Pool]:
    kept = _kept(held, [kind.name for kind in plan.slotted], 1)
    if kept:
        places = _places(kept, 1, share, padded)
        yield Pool(
            name="slots", noun="slot", group=None, places=places, kept=kept, claims=claimed_slots
        )


def _constants(held: Parts) -> Iterator[Pool]:
    for kind, part in held:
        if part.constant:
            yield Pool(
                name=f"{kind.name}, {part.name}",
                noun="row",
                group=None,
                places=Places(1, 1, 1, scribbled=0),
                kept=[Kept(kind, Sums(part, 1))],
                claims=lambda step: Claims(),
            )


def _kept(held: Parts, names: Sequence[str], positions: int) -> list[Kept]:
    return [
        Kept(kind, Sums(part, positions))
        for kind, part in held
        if kind.name in names and not part.constant
    ]


def _places(kept: Sequence[Kept], positions: int, share: int, scribbled: int) -> Places:
    most = share // sum(each.sums.place_bytes for each in kept)
    return Places(kept[0].sums.part.num_places, positions, most, scribbled=scribbled)
