"""What has changed between two reports of a model: "it was right last week"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from trueline.errors import UsageError
from trueline.verify.report import Check, Measure, Place, Power, Report, Status, wording

ABSENT = "absent"
"""Of a check that one run does not have: another tier, --only, or an older Trueline."""
BAD = (Status.FAILED, Status.ERROR)
KNOWN = (Status.PASSED, *BAD)
"""Covered: something is known."""
POWER_STEP = 2.0
"""What is injected grows in powers of two: one step is noise between two machines."""
BAND_CHANGE = 2.0


class Change(msgspec.Struct, frozen=True):
    what: str
    before: str
    after: str


class StatusChange(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    before: str
    after: str
    evidence: str
    place: Place | None


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A measure, by more than its band; where there is none, by more than its gate."""

    check: str
    measure: str
    before: float
    after: float
    allowed: float | None
    worse: bool


class PowerChange(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    place: Place
    before: float | None
    after: float | None
    worse: bool


class FaultChange(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    before: str
    after: str
    evidence: str
    worse: bool


class ReportDiff(msgspec.Struct, kw_only=True):
    worse: list[str]
    """In a phrase each; empty: nothing is worse."""
    setting: list[Change]
    """Model files, environment, options, what was asked for."""
    plan_removed: list[str]
    plan_added: list[str]
    ran: list[Change]
    """Implementations, over all checks that both runs have."""
    failing: list[StatusChange]
    """That did not fail before."""
    repaired: list[StatusChange]
    lost: list[StatusChange]
    """Coverage: something was known before."""
    gained: list[StatusChange]
    moved: list[Moved]
    bands: list[Change]
    """By more than a factor of two."""
    power: list[PowerChange]
    faults: list[FaultChange]


def require_comparable(a: Report, b: Report, files: tuple[Path, Path]) -> None:
    """Of one model: its files may be others, as where it was downloaded again."""
    first, second = a.model, b.model
    same = ("family", "layers", "parameters")
    differ = [name for name in same if getattr(first, name) != getattr(second, name)]
    if differ:
        raise UsageError(
            f"not comparable: {files[0]} is of {wording.line(first.name)} "
            f"({wording.subject(first)}), {files[1]} of {wording.line(second.name)} "
            f"({wording.subject(second)}): {' and '.join(differ)} differ; accepted: two reports "
            "of the same model"
        )


def diff(a: Report, b: Report) -> ReportDiff:
    """From `a`, the earlier one, to `b`."""
    failing, repaired, lost, gained = _statuses(a, b)
    moved, power, faults = list(_moved(a, b)), list(_power(a, b)), list(_faults(a, b))
    return ReportDiff(
        worse=[
            *_counted(failing, "check", "newly failing"),
            *_counted(lost, "check", "no longer covered"),
            *_counted([each for each in moved if each.worse], "measure", "up by more than noise"),
            *_counted([each for each in power if each.worse], "injected error", "seen less well"),
            *_counted([each for each in faults if each.worse], "known bug", "no longer caught"),
        ],
        setting=list(_setting(a, b)),
        plan_removed=[line for line in a.plan if line not in b.plan],
        plan_added=[line for line in b.plan if line not in a.plan],
        ran=_ran(a, b),
        failing=failing,
        repaired=repaired,
        lost=lost,
        gained=gained,
        moved=moved,
        bands=list(_bands(a, b)),
        power=power,
        faults=faults,
    )


def _counted(found: Sequence[object], what: str, how: str) -> list[str]:
    return [f"{wording.count(len(found), what)} {how}"] if found else []


# -- around the checks -------------------------------------------------------------------


def _setting(a: Report, b: Report) -> Iterator[Change]:
    for before, after in ((a.model, b.model), (a.environment, b.environment)):
        for name in before.__struct_fields__:
            yield from _changed(name, getattr(before, name), getattr(after, name))
    for name in dict.fromkeys([*a.options, *b.options]):
        values = a.options.get(name, "default"), b.options.get(name, "default")
        yield from _changed(f"option {name}", *values)
    yield from _changed("tier", a.tier, b.tier)
    yield from _changed("only", ", ".join(a.only), ", ".join(b.only))
    yield from _changed("skip", ", ".join(a.skip), ", ".join(b.skip))
    yield from _changed("injected errors", len(a.power), len(b.power))
    yield from _changed("known bugs tried", len(a.faults), len(b.faults))


def _changed(what: str, before: object, after: object) -> Iterator[Change]:
    if before != after:
        told = ("none" if each in (None, "") else str(each) for each in (before, after))
        yield Change(what, *told)


def _ran(a: Report, b: Report) -> list[Change]:
    """Each once, with the number of checks it is true of. A check that broke off has none."""
    counts: dict[tuple[str, str, str], int] = {}
    for before, after in _both(a, b):
        if not before.ran or not after.ran:
            continue
        for op in dict.fromkeys([*before.ran, *after.ran]):
            key = op, before.ran.get(op, "none"), after.ran.get(op, "none")
            if key[1] != key[2]:
                counts[key] = counts.get(key, 0) + 1
    return [
        Change(f"{op} in {wording.count(many, 'check')}", before, after)
        for (op, before, after), many in counts.items()
    ]


def _both(a: Report, b: Report) -> Iterator[tuple[Check, Check]]:
    earlier = {check.id: check for check in a.checks}
    for check in b.checks:
        if check.id in earlier:
            yield earlier[check.id], check


# -- the checks --------------------------------------------------------------------------


def _statuses(a: Report, b: Report) -> tuple[list[StatusChange], ...]:
    failing, repaired, lost, gained = [], [], [], []
    earlier = {check.id: check for check in a.checks}
    later = {check.id: check for check in b.checks}
    for name in dict.fromkeys([*later, *earlier]):
        before, after = earlier.get(name), later.get(name)
        told = after or before
        assert told is not None
        change = StatusChange(
            id=name,
            before=ABSENT if before is None else str(before.status),
            after=ABSENT if after is None else str(after.status),
            evidence=told.evidence if after is not None else "",
            place=told.place if after is not None else None,
        )
        was = None if before is None else before.status
        now = None if after is None else after.status
        if now in BAD and was not in BAD:
            failing.append(change)
        elif was in BAD and now == Status.PASSED:
            repaired.append(change)
        elif was in KNOWN and now not in KNOWN:
            lost.append(change)
        elif now in KNOWN and was not in KNOWN:
            gained.append(change)
    return failing, repaired, lost, gained


def _moved(a: Report, b: Report) -> Iterator[Moved]:
    for earlier, check in _both(a, b):
        before = _by_name(earlier.measures)
        for name, after in _by_name(check.measures).items():
            if name in before:
                yield from _movement(check.id, before[name], after)


def _by_name(found: Iterable[Measure]) -> dict[str, Measure]:
    """The worst of each name."""
    return {measure.name: measure for measure in sorted(found, key=wording.severity)}


def _movement(check: str, before: Measure, after: Measure) -> Iterator[Moved]:
    bands = [each for each in (before.band, after.band) if each is not None]
    gates = [each for each in (before.gate, after.gate) if each is not None]
    allowed = max(bands or gates, default=None)
    old, new = before.value, after.value
    if old == new or (math.isnan(old) and math.isnan(new)):
        return
    if math.isfinite(old) and math.isfinite(new):
        if allowed is None or abs(new - old) <= allowed:
            return
        worse = bool(gates) and new > old
    else:
        worse = math.isnan(new) or new == math.inf
    yield Moved(
        check=check, measure=after.name, before=old, after=new, allowed=allowed, worse=worse
    )


# -- what they would have noticed ----------------------------------------------------------


def _bands(a: Report, b: Report) -> Iterator[Change]:
    before = {(band.what, band.dtype): band.value for band in a.bands}
    for band in b.bands:
        old = before.get((band.what, band.dtype))
        if old is not None and not _within(old, band.value, BAND_CHANGE):
            yield Change(
                f"{band.what}, {band.dtype}", wording.number(old), wording.number(band.value)
            )


def _within(old: float, new: float, factor: float) -> bool:
    if math.isnan(old) and math.isnan(new):
        return True
    return old / factor <= new <= old * factor


def _power(a: Report, b: Report) -> Iterator[PowerChange]:
    def key(power: Power) -> tuple[str, Place]:
        return power.what, msgspec.structs.replace(power.place, implementation=None)

    before = {key(power): power for power in a.power}
    for power in b.power:
        earlier = before.get(key(power))
        if earlier is None or earlier.smallest == power.smallest:
            continue
        old = math.inf if earlier.smallest is None else earlier.smallest
        new = math.inf if power.smallest is None else power.smallest
        yield PowerChange(
            what=power.what,
            place=power.place,
            before=earlier.smallest,
            after=power.smallest,
            worse=new > old * POWER_STEP or (new == math.inf and old < math.inf),
        )


def _faults(a: Report, b: Report) -> Iterator[FaultChange]:
    """Only where both runs switched them on."""
    before = {fault.id: fault.outcome for fault in a.faults}
    for fault in b.faults:
        old = before.get(fault.id, ABSENT)
        if a.faults and old != fault.outcome:
            yield FaultChange(
                id=fault.id,
                before=old,
                after=fault.outcome,
                evidence=fault.evidence,
                worse=fault.outcome == "survived",
            )
