"""The differences of two reports as text: what is worse first, then what may have caused it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from trueline.verify.report import Report, wording
from trueline.verify.report.diff import (
    Change,
    FaultChange,
    Moved,
    PowerChange,
    ReportDiff,
    StatusChange,
)
from trueline.verify.report.terminal import heading, print_wrapped

MOST = 40
"""Of a kind that are listed; --json has all of them."""


def print_diff(console: Console, a: Report, b: Report, found: ReportDiff) -> None:
    if found.worse:
        print_wrapped(console, Text("WORSE", "bold red") + Text(f": {', '.join(found.worse)}"))
    else:
        print_wrapped(console, Text("nothing is worse", "bold green" if b.passed else "bold"))
    for name, report in (("before", a), ("after", b)):
        verdict = wording.verdict(report)
        told = f"{name:<7} {report.started}: {verdict.word}, {verdict.sentence}"
        print_wrapped(console, wording.clean(told), "  ", " " * 8)
    bad = [each for each in found.power if each.worse]
    better = [each for each in found.power if not each.worse]
    _print(console, "Newly failing", map(_status, found.failing), "bold red")
    _print(console, "No longer covered", map(_status, found.lost), "yellow")
    _print(console, "Measures that moved by more than their band", map(_moved, found.moved))
    _print(console, "Known bugs with another outcome", map(_fault, found.faults))
    _print(console, "Injected errors that are seen less well", map(_power, bad), "yellow")
    _print(console, "What changed around it", map(_change, found.setting))
    _print(console, "Implementations that ran", map(_change, found.ran))
    plan = [*(f"- {line}" for line in found.plan_removed)]
    plan += [f"+ {line}" for line in found.plan_added]
    _print(console, "Plan", plan)
    _print(console, "Noise bands", map(_change, found.bands))
    _print(console, "Repaired", map(_status, found.repaired), "green")
    _print(console, "Newly covered", map(_status, found.gained))
    _print(console, "Injected errors whose smallest seen differs", map(_power, better))


def _print(console: Console, title: str, lines: Iterable[str], style: str = "") -> None:
    told = list(lines)
    if not told:
        return
    heading(console, title)
    for each in told[:MOST]:
        print_wrapped(console, Text(wording.clean(each), style), "  ")
    if len(told) > MOST:
        print_wrapped(console, f"… and {len(told) - MOST:,} more", "  ")


def _status(change: StatusChange) -> str:
    told = wording.finding(change.place, change.evidence)
    return f"{change.id}: {change.before} → {change.after}{f': {told}' if told else ''}"


def _moved(moved: Moved) -> str:
    allowed = "" if moved.allowed is None else f" (moves by {wording.number(moved.allowed)})"
    sign = "worse: " if moved.worse else ""
    values = f"{wording.number(moved.before)} → {wording.number(moved.after)}"
    return f"{sign}{moved.check}, {moved.measure}: {values}{allowed}"


def _power(change: PowerChange) -> str:
    sizes = ("not seen" if s is None else wording.size(s) for s in (change.before, change.after))
    at = wording.where(change.place)
    return f"{change.what}{f' in {at}' if at else ''}: {' → '.join(sizes)}"


def _fault(change: FaultChange) -> str:
    sign = "worse: " if change.worse else ""
    beside = f": {wording.line(change.evidence, 200)}" if change.evidence else ""
    return f"{sign}{change.id}: {change.before} → {change.after}{beside}"


def _change(change: Change) -> str:
    return f"{change.what}: {wording.line(change.before)} → {wording.line(change.after)}"
