"""One rank's canaries: what its steps may write, and the checks that nothing else was written."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from trueline.cache.kinds import AnyKind
from trueline.cache.parts import Part
from trueline.cache.pool import NULL
from trueline.device import mark, to_host
from trueline.engine.caches import Caches
from trueline.engine.canaries.history import History
from trueline.engine.canaries.pools import Kept, Pool, find_pools
from trueline.engine.canaries.report import MOST_HITS, CanaryHit, CanaryReport, Change, Hit
from trueline.engine.canaries.sums import Compared, Difference
from trueline.engine.messages import Admission, StepMessage, Unowned
from trueline.plan.plan import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    pool: Pool
    kept: Kept
    compared: Compared


class Check:
    """Launched: its outcome is on its way to the host, beside the step's results."""

    def __init__(self, canaries: Canaries, number: int, found: list[Found]) -> None:
        self.canaries, self.number, self.found = canaries, number, found
        flags = [each.compared.bad.any() for each in found]
        self._hit = to_host(torch.stack(flags).any()) if flags else torch.tensor(False)
        self._wait = mark()

    def settle(self) -> None:
        """Waits, if need be; raises CanaryHit."""
        self._wait()
        self.canaries.num_checks += 1
        if bool(self._hit):
            raise self.canaries.hit(self)


class Canaries:
    def __init__(self, plan: Plan, caches: Caches, *, rank: int, padded: bool) -> None:
        """`padded`: there are captured steps, whose padded rows write the null places."""
        assert plan.canaries is not None
        self.plan, self.options, self.rank = plan, plan.canaries, rank
        self.history = History()
        self.number = self.num_checks = 0
        self.pools = find_pools(plan, caches, padded=padded)
        guarded = {each.kind.name for pool in self.pools for each in pool.kept}
        self.unguarded = [kind.name for kind in plan.kinds if kind.name not in guarded]

    def admit(self, admission: Admission) -> None:
        self.history.admit(admission)

    def poisoned(self, unowned: Unowned) -> None:
        """NaN was put there."""
        for pool in self.pools:
            if pool.group is not None:
                pool.places.poison(unowned.blocks[pool.group])
                pool.places.poison_cells(unowned.cells[pool.group])
            elif pool.noun == "slot":
                pool.places.poison(unowned.slots)

    def launching(self, step: StepMessage) -> None:
        """Before a step. Raises CanaryHit where it is to write what no step may."""
        if not self.number:
            self._look(everything=False)
        self.number += 1
        claims = {pool.name: pool.claims(step) for pool in self.pools}
        self.history.add(self.number, step, claims)
        for pool in self.pools:
            claimed = claims[pool.name]
            if refused := claimed.refused():
                hits = [self._claimed(pool, place) for place in refused]
                raise self._hit(self.number, hits)
            pool.places.write(
                claimed.places, claimed.starts, claimed.stops, claimed.writers, claimed.again
            )

    def launched(self, graph_rows: int | None) -> Check | None:
        """After a step was launched; `graph_rows`: of the captured one that was replayed."""
        self.history.captured(graph_rows)
        return None if self.number % self.options.interval else self._look(everything=False)

    def last_check(self) -> None:
        """Of all that is known, at the end; raises CanaryHit."""
        if self.number:
            self._look(everything=True).settle()

    def _look(self, *, everything: bool) -> Check:
        """Sums that were to be taken, and were not because something failed, are not known."""
        most = self.options.check_bytes
        try:
            found = [
                Found(pool, kept, compared)
                for pool in self.pools
                if len(chosen := pool.places.choose(self.number, everything=everything))
                for kept in pool.kept
                for compared in kept.sums.compare(chosen, most)
            ]
            return Check(self, self.number, found)
        except BaseException:
            for pool in self.pools:
                pool.places.forget()
            raise

    # -- what came of it -----------------------------------------------------------------

    def hit(self, check: Check) -> CanaryHit:
        hits = [
            self._changed(each.pool, each.kept, difference)
            for each in check.found
            for difference in each.kept.sums.differences(each.compared)
        ]
        return self._hit(check.number, hits)

    def _hit(self, number: int, hits: list[Hit]) -> CanaryHit:
        hits.sort(key=lambda hit: hit.clean_step, reverse=True)  # with the fewest who may have
        steps = range(hits[-1].clean_step + 1, number + 1)
        report = CanaryReport(
            rank=self.rank,
            step=number,
            interval=self.options.interval,
            num_hits=len(hits),
            hits=hits[:MOST_HITS],
            steps=self.history.steps(steps),
            tables=self.history.tables(steps),
        )
        file = report.write(self.options.report_dir)
        logger.error("%s; report: %s", report.words(), file)
        return CanaryHit(report)

    def _changed(self, pool: Pool, kept: Kept, difference: Difference) -> Hit:
        part, place, row = kept.sums.part, difference.place, difference.row
        change = Change(
            layer=kept.kind.layers[difference.layer],
            part=part.name,
            row=row,
            byte=part.byte(place, row or 0),
            num_bytes=part.row_bytes,
        )
        why = _why(pool, part, difference)
        return self._told(pool, kept.kind, place, change, why, difference.clean_step)

    def _claimed(self, pool: Pool, place: int) -> Hit:
        why = (
            f"a row of this step is to write the null {pool.noun}, which nobody owns"
            if place == NULL
            else "two rows of this step are to write it"
        )
        return self._told(pool, pool.kept[0].kind, place, None, why, self.number - 1)

    def _told(
        self,
        pool: Pool,
        kind: AnyKind,
        place: int,
        change: Change | None,
        why: str,
        clean_step: int,
    ) -> Hit:
        history, count = self.history, pool.places.count
        owned = pool.group is not None or pool.noun == "slot"
        beside = [at for at in (place - 1, place + 1) if owned and NULL < at < count - 1]
        chosen = self.plan.selections
        return Hit(
            kind=kind.name,
            noun=pool.noun,
            place=place,
            change=change,
            why=why,
            clean_step=clean_step,
            writer=history.writer(int(pool.places.writer[place])),
            holders=history.holders(pool.group, place) if owned else [],
            neighbours={at: history.holders(pool.group, at) for at in beside},
            implementations={op: chosen[op].name for op in kind.writers if op in chosen},
        )


def _why(pool: Pool, part: Part, difference: Difference) -> str:
    places, place = pool.places, difference.place
    if part.constant:
        return "nobody ever writes it"
    if place == NULL:
        return f"it is the null {pool.noun}, which nobody owns"
    if place == places.count - 1:
        return f"it stands behind the last {pool.noun}, and nobody is given it"
    if pool.noun == "slot":
        return "no row of these steps was to write it"
    if places.writer[place] < 0:
        return "no request has ever written it"
    first, known = difference.positions
    return f"its positions {first} to {known - 1} were written, and no row was to write them again"
