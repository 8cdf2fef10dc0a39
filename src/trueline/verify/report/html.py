"""A report as one page: it needs no script, no network and no other file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from trueline import __version__
from trueline.verify.report import (
    Alternative,
    Check,
    Curve,
    Measure,
    Power,
    Report,
    Status,
    TokenDiff,
    charts,
    wording,
)

HERE = Path(__file__).parent
LEAST_STRIPS = 4
"""Curves along the same layers that make a heat map worth looking at."""
POWER_LEVELS = (2.0**-12, 2.0**-9, 2.0**-6, 2.0**-3)
CLASSES = {
    Status.PASSED: "passed",
    Status.FAILED: "failed",
    Status.ERROR: "error",
    Status.NOT_COVERED: "uncovered",
}
ALONG = {
    "layer": "by layer",
    "position": "by position",
    "composition": "by batch composition",
}


def page(report: Report) -> str:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"powers": _powers, "whole": _whole, "power_strip": power_strip}
    return environment.get_template("page.html").render(
        report=report,
        words=wording,
        charts=charts,
        classes=CLASSES,
        verdict=wording.verdict(report),
        groups=wording.groups(report.checks),
        coverage=_coverage(report),
        curves=_curves(report.curves),
        heat_maps=_heat_maps(report.curves),
        faults=wording.outcomes(report.faults),
        powers=wording.power_summaries(report.power),
        rows_of=rows_of,
        token_rows=token_rows,
        sheet=Markup((HERE / "page.css").read_text()),
        version=__version__,
    )


def _finalize(value: object) -> object:
    """Whatever is printed; what we drew ourselves is markup, and clean."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return wording.clean(value)
    return value


def _powers(text: str) -> str:
    """2^-9 as it is written on paper."""
    return re.sub(
        r"(?<=\b2)\^(-?\d+)\b", lambda found: found[1].translate(charts.SUPERSCRIPT), text
    )


def _whole(text: str) -> Markup:
    """No line ends within a number: a browser would break 9.1e-4 after its minus."""
    escaped = str(escape(wording.clean(text)))
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="whole">\g<0></span>', escaped))


def _coverage(report: Report) -> list[tuple[str, str, int]]:
    """Class, name and number of checks, in the order of the bar."""
    counts = report.counts()
    order = (Status.FAILED, Status.ERROR, Status.PASSED, Status.NOT_COVERED)
    return [(CLASSES[each], str(each), counts[each]) for each in order if counts[each]]


def rows_of(check: Check) -> list[Measure | None]:
    """A table's rows: each measure, the worst first; one row without any."""
    return [*sorted(check.measures, key=wording.severity, reverse=True)] or [None]


# -- curves ------------------------------------------------------------------------------


def _curves(curves: list[Curve]) -> list[tuple[str, list[Curve]]]:
    """By what they go along; the ones above their gates first."""
    found: dict[str, list[Curve]] = {along: [] for along in ALONG}
    for curve in curves:
        found.setdefault(curve.along, []).append(curve)
    return [
        (ALONG.get(along, f"by {along}"), sorted(members, key=_is_good))
        for along, members in found.items()
        if members
    ]


def _is_good(curve: Curve) -> bool:
    return all(point.good for point in charts.points(curve))


@dataclass(frozen=True)
class HeatMap:
    labels: list[str]
    rows: list[tuple[str, Markup]]


def _heat_maps(curves: list[Curve]) -> list[HeatMap]:
    """Of curves along the same layers, one under the other."""
    found: dict[tuple[str, ...], list[Curve]] = {}
    for curve in curves:
        if curve.along == "layer" and len(curve.values) > 1:
            found.setdefault(tuple(curve.labels), []).append(curve)
    return [
        HeatMap(
            list(labels),
            [(c.title, charts.strip(charts.error_cells(c), charts.describe(c))) for c in members],
        )
        for labels, members in found.items()
        if len(members) >= LEAST_STRIPS
    ]


def power_strip(summary: wording.PowerSummary) -> Markup:
    """Where a layer's errors are seen: the paler, the smaller."""
    layers = [power for power in summary.tried if power.place.layer is not None]
    if len(layers) < LEAST_STRIPS:
        return Markup("")
    cells = [charts.Cell(_power_level(power), _told(power)) for power in layers]
    return charts.strip(cells, f"{wording.clean(summary.what)}: the smallest seen, by layer")


def _power_level(power: Power) -> str:
    if power.smallest is None:
        return "over"
    return f"h{sum(power.smallest > limit for limit in POWER_LEVELS)}"


def _told(power: Power) -> str:
    seen = wording.injected(power, power.smallest if power.smallest is not None else power.unseen)
    return seen if power.smallest is not None else f"not seen: {seen}"


# -- tokens ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRow:
    token: int
    text: str
    ours: str
    reference: str
    ours_width: float
    reference_width: float
    """In percent: its probability."""


def token_rows(diff: TokenDiff) -> list[TokenRow]:
    """The likeliest of either side, in the reference's order."""
    ours = {each.token: each for each in diff.ours}
    reference = {each.token: each for each in diff.reference}
    order = list(dict.fromkeys([*reference, *ours]))
    return [
        TokenRow(
            token=token,
            text=wording.token_text((reference.get(token) or ours[token]).text),
            ours=_percent(ours.get(token)),
            reference=_percent(reference.get(token)),
            ours_width=_width(ours.get(token)),
            reference_width=_width(reference.get(token)),
        )
        for token in order
    ]


def _percent(alternative: Alternative | None) -> str:
    """Beyond its top-k nothing is known of a token."""
    if alternative is None:
        return "not in its top-k"
    return "NaN" if math.isnan(alternative.logprob) else f"{_width(alternative):.3g} %"


def _width(alternative: Alternative | None) -> float:
    if alternative is None or math.isnan(alternative.logprob):
        return 0.0
    return 100 * math.exp(min(alternative.logprob, 0.0))
