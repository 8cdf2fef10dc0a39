"""The pictures of a report's page: SVG without styles of its own, which the page's sheet gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trueline.errors import short
from trueline.verify.report import Curve, wording

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 380, 46, 370, 12, 152
"""Of a chart, in pixels of a phone: there it is shown as large as it is."""
HEIGHT, ROW = 186, 34
MOST_POINTS = 120
"""Drawn of a curve: of more, each point is the largest of its neighbours."""
MOST_ROWS = 40
DECADES = 8
"""The most that an axis has room for."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Point:
    label: str
    value: float
    band: float | None
    gate: float | None

    @property
    def good(self) -> bool:
        return self.gate is None or self.value <= self.gate

    @property
    def told(self) -> str:
        parts = [f"band {wording.number(self.band, 2)}" if self.band is not None else ""]
        parts += [f"accepted {wording.number(self.gate, 2)}" if self.gate is not None else ""]
        beside = ", ".join(part for part in parts if part)
        return wording.number(self.value) + (f" ({beside})" if beside else "")


def points(curve: Curve) -> list[Point]:
    """Lists of other lengths than the values' are a mistake of whoever measured: they are cut."""

    def at(values: Sequence[float], index: int) -> float | None:
        return values[index] if index < len(values) else None

    return [
        Point(
            wording.clean(curve.labels[i]) if i < len(curve.labels) else str(i),
            value,
            at(curve.band, i),
            at(curve.gate, i),
        )
        for i, value in enumerate(curve.values)
    ]


def _share(point: Point) -> float:
    """Of what is accepted; NaN and what fails first."""
    if not point.good:
        share = point.value / point.gate if point.gate else math.inf
        return share if share > 1 else math.inf
    share = point.value / point.gate if point.gate else 0.0
    return share if math.isfinite(share) else 0.0


def worst_point(curve: Curve) -> Point | None:
    return max(points(curve), key=_share, default=None)


def caption(curve: Curve) -> str:
    """A chart in a sentence, for those who cannot see it and for a glance."""
    worst = worst_point(curve)
    if worst is None:
        return "nothing was measured"
    bad = sum(not point.good for point in points(curve))
    along = wording.clean(curve.along)
    at = f"'{worst.label}'" if along == "composition" else f"{along} {worst.label}"
    told = f"nearest to its gate: {at}, {worst.told}"
    if not bad:
        return told
    return f"{bad} of {len(curve.values)} above what is accepted; worst: {at}, {worst.told}"


def describe(curve: Curve) -> str:
    return f"{wording.clean(curve.title)}: {caption(curve)}"


# -- axes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Logarithmic, in whole decades; zeros lie on its lower end, NaN and infinity on its upper."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def of(cls, shown: Iterable[Point], start: float, end: float) -> Axis:
        numbers = [
            each
            for point in shown
            for each in (point.value, point.band, point.gate)
            if each is not None and math.isfinite(each) and each > 0
        ]
        if not numbers:
            return cls(-3, 0, start, end)
        high = math.ceil(math.log10(max(numbers)) + 0.05)
        low = math.floor(math.log10(min(numbers)) - 0.05)
        return cls(max(min(low, high - 2), high - DECADES), high, start, end)

    def at(self, value: float) -> float:
        if math.isnan(value) or value == math.inf:
            share = 1.0
        elif value <= 0:
            share = 0.0
        else:
            share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * min(max(share, 0.0), 1.0), 1)

    def ticks(self) -> Iterator[tuple[float, str]]:
        step = 2 if self.high - self.low > 5 else 1
        for power in range(self.low, self.high + 1, step):
            yield self.at(10.0**power), "10" + str(power).translate(SUPERSCRIPT)


def chart(curve: Curve) -> Markup:
    shown = points(curve)
    if not shown:
        return Markup("")
    return _rows(curve, shown) if curve.along == "composition" else _line(curve, shown)


def _svg(height: int, label: str, parts: Iterable[str]) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
        'aria-label="{label}">{body}</svg>'
    ).format(w=WIDTH, h=height, label=label, body=Markup("").join(parts))


# -- along layers and positions ------------------------------------------------------------


def _line(curve: Curve, measured: list[Point]) -> Markup:
    shown = _largest_of_neighbours(measured)
    along, axis = wording.clean(curve.along), Axis.of(shown, BOTTOM, TOP)
    step = (RIGHT - LEFT) / len(shown)
    xs = [round(LEFT + step * (i + 0.5), 1) for i in range(len(shown))]
    radius = 2.4 if len(shown) <= 60 else 1.5
    marks = [
        Markup("<g>{}<title>{}</title></g>").format(
            _shape(point, x, axis.at(point.value), radius), f"{along} {point.label}: {point.told}"
        )
        for point, x in zip(shown, xs, strict=True)
    ]
    parts = [
        *_grid(axis),
        _region("band", [point.band for point in shown], axis, step),
        _level("gate", [point.gate for point in shown], axis, step),
        _polyline(shown, xs, axis),
        *marks,
        *_labels(shown, xs, along),
    ]
    return _svg(HEIGHT, describe(curve), parts)


def _largest_of_neighbours(measured: list[Point]) -> list[Point]:
    """So that what stands out cannot be lost."""
    size = math.ceil(len(measured) / MOST_POINTS)
    runs = [measured[i : i + size] for i in range(0, len(measured), size)]
    return [max(run, key=lambda point: (_share(point), point.value)) for run in runs]


def _grid(axis: Axis) -> Iterator[Markup]:
    for y, label in axis.ticks():
        yield Markup('<path class="grid" d="M{} {}H{}"/>').format(LEFT, y, RIGHT)
        yield Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 5, y + 3.5, label
        )


def _steps(levels: list[float | None], axis: Axis, step: float) -> Iterator[tuple[float, ...]]:
    """Runs of points whose level is known: x from, x to, y."""
    for index, level in enumerate(levels):
        if level is not None and not math.isnan(level):
            start = LEFT + step * index
            yield round(start, 1), round(start + step, 1), axis.at(level)


def _region(name: str, levels: list[float | None], axis: Axis, step: float) -> Markup:
    path = "".join(f"M{a} {BOTTOM}V{y}H{b}V{BOTTOM}z" for a, b, y in _steps(levels, axis, step))
    return Markup('<path class="{}" d="{}"/>').format(name, path) if path else Markup("")


def _level(name: str, levels: list[float | None], axis: Axis, step: float) -> Markup:
    path, end = "", 0.0
    for a, b, y in _steps(levels, axis, step):
        path += f"V{y}H{b}" if path and a == end else f"M{a} {y}H{b}"
        end = b
    return Markup('<path class="{}" d="{}"/>').format(name, path) if path else Markup("")


def _polyline(shown: list[Point], xs: list[float], axis: Axis) -> Markup:
    """It breaks where there is no number."""
    path, pen = "", "M"
    for point, x in zip(shown, xs, strict=True):
        if not math.isfinite(point.value):
            pen = "M"
            continue
        path += f"{pen}{x} {axis.at(point.value)}"
        pen = "L"
    return Markup('<path class="values" d="{}"/>').format(path)


def _kind(point: Point) -> str:
    return "bad" if not point.good else "zero" if point.value == 0 else "good"


def _shape(point: Point, x: float, y: float, radius: float) -> Markup:
    kind = _kind(point)
    if not math.isfinite(point.value):
        return Markup('<path class="{} cross" d="M{} {}l8 8m0 -8l-8 8"/>').format(
            kind, x - 4, y - 4
        )
    return Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(
        kind, x, y, max(radius, 3.4) if kind == "bad" else radius
    )


def _labels(shown: list[Point], xs: list[float], along: str) -> Iterator[Markup]:
    every = max(1, math.ceil(len(shown) / 9))
    for index in range(0, len(shown), every):
        yield Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
            xs[index], BOTTOM + 14, short(shown[index].label, 8)
        )
    yield Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        (LEFT + RIGHT) / 2, HEIGHT - 4, along
    )


# -- by composition ------------------------------------------------------------------------


def _rows(curve: Curve, measured: list[Point]) -> Markup:
    order = sorted(measured, key=_share, reverse=True) if len(measured) > MOST_ROWS else measured
    shown = order[:MOST_ROWS]
    axis = Axis.of(shown, 8, WIDTH - 10)
    height = 8 + ROW * len(shown) + 22
    parts: list[Markup] = []
    ticks = list(axis.ticks())
    for index, (x, label) in enumerate(ticks):
        anchor = "start" if index == 0 else "end" if index == len(ticks) - 1 else "middle"
        parts.append(Markup('<path class="grid" d="M{} 4V{}"/>').format(x, height - 20))
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(
                x, height - 6, anchor, label
            )
        )
    for index, point in enumerate(shown):
        parts.append(_row(point, 8 + ROW * index, axis))
    return _svg(height, describe(curve), parts)


def _row(point: Point, y: float, axis: Axis) -> Markup:
    """Where the number lies between nothing, the band and the gate. No bar: its length would say
    nothing on an axis without a zero."""
    middle, start = y + 21, axis.start
    kind = _kind(point)
    value = "0, exact" if kind == "zero" else wording.number(point.value)
    parts = [
        Markup('<text class="name" x="{}" y="{}">{}</text>').format(
            start, y + 11, short(point.label, 44)
        ),
        Markup('<text class="value {}" x="{}" y="{}" text-anchor="end">{}</text>').format(
            kind, axis.end, y + 11, value
        ),
        Markup('<path class="grid" d="M{} {}H{}"/>').format(start, middle, axis.end),
    ]
    if point.band is not None and not math.isnan(point.band):
        parts.append(
            Markup('<rect class="band" x="{}" y="{}" width="{}" height="9"/>').format(
                start, middle - 4.5, round(max(axis.at(point.band) - start, 0), 1)
            )
        )
    if point.gate is not None and not math.isnan(point.gate):
        parts.append(
            Markup('<path class="gate" d="M{} {}v12"/>').format(axis.at(point.gate), middle - 6)
        )
    parts.append(_shape(point, axis.at(point.value), middle, 3.2))
    return Markup("<g>{}<title>{}</title></g>").format(
        Markup("").join(parts), f"{point.label}: {point.told}"
    )


# -- strips of cells -------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    level: str
    told: str


def strip(cells: Sequence[Cell], label: str) -> Markup:
    """A row of a heat map: as wide as its place, a cell each."""
    body = Markup("").join(
        Markup('<rect class="{}" x="{}" width="1" height="1"><title>{}</title></rect>').format(
            cell.level, index, cell.told
        )
        for index, cell in enumerate(cells)
    )
    return Markup(
        '<svg class="strip" viewBox="0 0 {} 1" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(max(len(cells), 1), label, body)


def error_cells(curve: Curve) -> list[Cell]:
    """By share of what is accepted."""
    return [
        Cell(_error_level(point), f"{wording.clean(curve.along)} {point.label}: {point.told}")
        for point in points(curve)
    ]


def _error_level(point: Point) -> str:
    if not point.good:
        return "over"
    share = _share(point)
    return "h0" if share == 0 else f"h{1 + sum(share > limit for limit in (0.1, 0.25, 0.5))}"
