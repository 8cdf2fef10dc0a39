"""What no request owns of the caches. Where asked for, NaN is put there: a read of it shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from trueline.cache.blocks import BlockPool
from trueline.cache.groups import BlockGroups
from trueline.cache.layout import cells
from trueline.cache.pool import NULL, Pool
from trueline.cache.slots import SlotPool
from trueline.engine.messages import Unowned
from trueline.engine.request import Request
from trueline.engine.step import Step


def unowned(
    step: Step, requests: Collection[Request], blocks: BlockGroups, slots: SlotPool | None
) -> Unowned:
    """As `step`, not launched yet, will find it."""
    starts = {row.request.id: row.start for row in step.rows}
    return Unowned(
        blocks=[_unowned_places(pool) for pool in blocks.pools],
        cells=[
            [
                cell
                for request in requests
                if request.tables
                for cell in _unread_cells(request, request.tables[group], pool, starts)
            ]
            for group, pool in enumerate(blocks.pools)
        ],
        slots=_unowned_places(slots) if slots else [],
    )


def _unread_cells(
    request: Request, table: list[int], pool: BlockPool, starts: Mapping[int, int]
) -> Iterator[int]:
    """Of blocks that it holds: not written yet, or behind the window of all that is still to come
    and not known by a hash, so that nobody else starts from it."""
    size = pool.block_size
    yield from cells(size, table, request.num_computed, len(table) * size)
    start = starts.get(request.id, request.num_computed)
    first = pool.first_read(start)
    held = first // size < len(table)
    # what steps in flight write may still get a hash
    if held and start == request.num_written and not pool.hash_of(table[first // size]):
        yield from cells(size, table, first - first % size, first)


def _unowned_places(pool: Pool) -> list[int]:
    """The null one, and those that no request holds and the prefix cache does not know."""
    return [NULL, *(i for i in pool.ids if not pool.references(i) and pool.hash_of(i) is None)]
