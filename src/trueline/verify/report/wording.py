"""What the table, the page and the XML of a report say alike: numbers, sentences, what is worst."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trueline.errors import short
from trueline.utils.progress import human_bytes, human_count
from trueline.verify.report import Check, FaultRow, Measure, Model, Place, Power, Report, Status

OUTCOMES = ("survived", "caught", "no effect", "not met", "not here")
"""Of faults, what matters most first."""
_HIDDEN = re.compile(
    # C0, C1, directions and line ends of Unicode, surrogates, what XML has no place for
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufffe\uffff]"
)
_WHITE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})


def clean(text: str) -> str:
    """Names and evidence come from checkpoints and packages: what would steer a terminal, turn a
    line around or break XML is written out."""
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def line(text: str, most: int = 300) -> str:
    return short(" ".join(clean(text).split()), most)


def token_text(text: str) -> str:
    """White space decides which token it is, so it is shown."""
    return clean(text.translate(_WHITE))


# -- numbers ---------------------------------------------------------------------------


def number(value: float, digits: int = 3) -> str:
    """Up to so many digits: 0.0513 is 5.13e-2, so that sizes compare at a glance."""
    if math.isnan(value):
        return "NaN"
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e6:
        return str(int(value))
    if 0.1 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(power)}"


def size(value: float) -> str:
    """Of an injected error: they are graded in powers of two."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent <= 0 else number(value)


def seconds(value: float) -> str:
    if value < 99.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def figures(measure: Measure) -> tuple[str, str, str]:
    """Value, band, gate, with as many digits as it takes to tell bad from accepted."""
    gate, band = measure.gate, measure.band
    digits = next((d for d in (3, 5, 9) if _told_apart(measure, d)), 17)
    return (
        number(measure.value, digits),
        "" if band is None else number(band, 2),
        "" if gate is None else number(gate, 2 if digits == 3 else digits),
    )


def _told_apart(measure: Measure, digits: int) -> bool:
    if measure.gate is None or measure.good:
        return True
    gate = number(measure.gate, 2 if digits == 3 else digits)
    return not float(number(measure.value, digits)) <= float(gate)


def measured(measure: Measure) -> str:
    """`value (band …, accepted …)`."""
    value, band, gate = figures(measure)
    beside = [f"band {band}" if band else "", f"accepted {gate}" if gate else ""]
    told = ", ".join(each for each in beside if each)
    return f"{value} ({told})" if told else value


def severity(measure: Measure) -> float:
    """As a share of what is accepted: above 1 is bad, NaN the worst."""
    if measure.gate is None:
        return -1.0
    share = measure.value / measure.gate if measure.gate else math.nan
    if measure.good:
        return share if math.isfinite(share) else 0.0
    return share if share > 1 else math.inf


def worst(measures: Iterable[Measure]) -> Measure | None:
    return max(measures, key=severity, default=None)


def count(many: int, what: str) -> str:
    return f"{many:,} {what}" if many == 1 else f"{many:,} {what}s"


# -- the run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    word: str
    good: bool
    sentence: str


def verdict(report: Report) -> Verdict:
    """What is not covered is in the sentence: nobody reads "passed" without it."""
    said = counted(report.counts())
    if report.failed:
        return Verdict("FAILED", False, said)
    if report.interrupted:
        return Verdict("INTERRUPTED", False, said)
    if not report.passed:
        return Verdict("NOTHING PASSED", False, said)
    return Verdict("PASSED", True, said)


def counted(counts: dict[Status, int]) -> str:
    names = {
        Status.PASSED: "passed",
        Status.FAILED: "failed",
        Status.ERROR: "ended in an error",
        Status.NOT_COVERED: "not covered",
    }
    parts = [f"{counts[status]:,} {name}" for status, name in names.items() if counts[status]]
    return ", ".join(parts) or "no checks"


def first_wrong(report: Report) -> Check | None:
    """Checks go from small to large: the first that knows its place is the narrowest."""
    placed = (check for check in report.failed if check.place is not None)
    return next(placed, next(iter(report.failed), None))


def where(place: Place | None) -> str:
    """With the composition, which a place's own text leaves out."""
    if place is None:
        return ""
    parts = [str(place), f"in '{place.composition}'" if place.composition else ""]
    return clean(" ".join(part for part in parts if part))


def finding(place: Place | None, evidence: str) -> str:
    """In a line: where, and how the evidence begins."""
    first, _, _ = evidence.strip().partition("\n")
    return ": ".join(part for part in (where(place), line(first, 200)) if part)


def subject(model: Model) -> str:
    parts = [model.family, model.dtype, count(model.layers, "layer")]
    parts += [f"{human_count(model.parameters)} parameters"] if model.parameters else []
    return clean(", ".join([*parts, human_bytes(model.bytes)]))


def asked_for(report: Report) -> str:
    """What a reader must know about a run that was not asked for all of its tier."""
    parts = [report.tier]
    parts += [f"only {', '.join(report.only)}"] if report.only else []
    parts += [f"without {', '.join(report.skip)}"] if report.skip else []
    return clean("; ".join(parts))


@dataclass(frozen=True)
class Group:
    name: str
    checks: list[Check]

    @property
    def counts(self) -> dict[Status, int]:
        return {status: sum(c.status == status for c in self.checks) for status in Status}

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    @property
    def bad(self) -> bool:
        return any(check.status in (Status.FAILED, Status.ERROR) for check in self.checks)

    @property
    def worst(self) -> tuple[Check, Measure] | None:
        found = [(check, measure) for check in self.checks for measure in check.measures]
        return max(found, key=lambda each: severity(each[1]), default=None)


def groups(checks: Iterable[Check]) -> list[Group]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.group, []).append(check)
    return [Group(name, members) for name, members in found.items()]


def short_id(check: Check) -> str:
    """Without its group."""
    return clean(check.id.partition("/")[2] or check.id)


def not_covered(report: Report) -> dict[str, list[str]]:
    """Checks by the reason why they could not be forced here."""
    reasons: dict[str, list[str]] = {}
    for check in report.checks:
        if check.status == Status.NOT_COVERED:
            reason = line(check.evidence) or "no reason was given"
            reasons.setdefault(reason, []).append(clean(check.id))
    return reasons


UNUSUAL = "Unusual weights: right or not, the engine takes them as they are"


def replay_command(file: str) -> str:
    return f"trueline replay {shlex.quote(clean(file))}"


def run_facts(report: Report) -> Iterator[tuple[str, str]]:
    """Of the machine and the run; what is not there is left out."""
    model, at = report.model, report.environment
    yield "model", f"{clean(model.name)}: {subject(model)}"
    yield "fingerprint", clean(model.fingerprint)
    took = seconds(report.seconds)
    if report.estimated is not None:
        took += f" (estimated {seconds(report.estimated)})"
    yield "run", f"{asked_for(report)}, begun {clean(report.started)}, {took}"
    yield "options", clean(", ".join(f"{k}={v}" for k, v in report.options.items())) or "defaults"
    yield "trueline", clean(at.trueline) + (f" ({clean(at.commit)})" if at.commit else "")
    triton = f", Triton {at.triton}" if at.triton else ""
    yield "software", clean(f"Python {at.python}, PyTorch {at.torch}{triton}, {at.platform}")
    yield "cpu", f"{clean(at.cpu)}, {count(at.threads, 'thread')}"
    yield "native", line(at.native, 400)
    if at.gpu:
        yield "gpu", clean(at.gpu + (f", driver {at.driver}" if at.driver else ""))
    if report.command:
        yield "command", clean(report.command)


# -- what it would have noticed ----------------------------------------------------------


@dataclass(frozen=True)
class PowerSummary:
    """One way of injecting errors, over the places where it was tried."""

    what: str
    tried: list[Power]

    @property
    def weakest(self) -> Power:
        """Where an error must be largest to be seen."""
        return max(self.tried, key=_needed)

    @property
    def strongest(self) -> Power:
        return min(self.tried, key=_needed)

    @property
    def missed(self) -> list[Power]:
        return [power for power in self.tried if power.smallest is None]


def _needed(power: Power) -> float:
    return math.inf if power.smallest is None else power.smallest


def power_summaries(powers: Iterable[Power]) -> list[PowerSummary]:
    found: dict[str, list[Power]] = {}
    for power in powers:
        found.setdefault(power.what, []).append(power)
    return [PowerSummary(what, tried) for what, tried in found.items()]


def injected(power: Power, error: float | None) -> str:
    """`softmax scale too large by this factor: 2^-9 in layer 3`."""
    parts = ["" if error is None else size(error)]
    parts += [f"in {where(power.place)}" if where(power.place) else ""]
    told = " ".join(part for part in parts if part)
    return f"{clean(power.what)}: {told}" if told else clean(power.what)


def noticed(summary: PowerSummary) -> str | None:
    """The weakest of the places where something was seen decides what a run that passes says."""
    seen = [power for power in summary.tried if power.smallest is not None]
    if not seen:
        return None
    weakest = max(seen, key=_needed)
    text = injected(weakest, weakest.smallest)
    if len(seen) > 1:
        best = _needed(summary.strongest)
        text += f", the weakest of {count(len(seen), 'place')}"
        text += f" (best: {size(best)})" if best < _needed(weakest) else ""
    return text


def not_noticed(summary: PowerSummary) -> str | None:
    if not summary.missed:
        return None
    largest = max(summary.missed, key=lambda power: power.unseen or 0)
    others = len(summary.missed) - 1
    more = f", nor in {count(others, 'other place')}" if others else ""
    return injected(largest, largest.unseen) + more


def naming(power: Power) -> str:
    """Whether the check that saw it also said where it was."""
    if power.named is None:
        return "" if power.smallest is None else "no place named"
    if power.named.layer == power.place.layer:
        return "right layer named" if power.place.layer is not None else f"named {power.named}"
    return f"named {where(power.named)}"


def outcomes(faults: Iterable[FaultRow]) -> dict[str, list[FaultRow]]:
    """By outcome, those that survived first; unknown outcomes are kept, behind them."""
    found: dict[str, list[FaultRow]] = {outcome: [] for outcome in OUTCOMES}
    for fault in faults:
        found.setdefault(fault.outcome, []).append(fault)
    return {outcome: rows for outcome, rows in found.items() if rows}
