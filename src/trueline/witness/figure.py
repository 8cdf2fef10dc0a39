"""The figures of `trueline witness` as one SVG: a row for every fault, with the accuracy without
and with it, both in the mixed batch."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from trueline.witness.report import points
from trueline.witness.run import FaultFigures, ProblemSet, Share, WitnessFigures
from trueline.witness.stories import STORIES

WIDTH, LEFT, BAR = 1000, 430, 470
ROW, THICK = 34, 11
RIGHT_COLOUR, FAULT_COLOUR, INK, PALE = "#5a9a60", "#c0504d", "#222222", "#777777"


def draw(figures: WitnessFigures) -> str:
    parts: list[str] = []
    y = 64
    for story, title in STORIES.items():
        rows = [(model, fault) for model, fault in _faults(figures) if fault["story"] == story]
        unseen = [each for each in figures["unseen"] if each["story"] == story]
        if not rows and not unseen:
            continue
        parts.append(_text(20, y + 14, f"{story}. {title}", weight="bold"))
        y += 26
        for model, fault in rows:
            parts += _row(y, model, fault)
            y += ROW
        for each in unseen:
            parts += _labels(y, each["what"], each["model"])
            caught = f"accuracy does not show it; caught by the check “{each['check']}”"
            parts.append(_text(LEFT, y + 16, caught, size=12, fill=PALE))
            y += ROW
        y += 12
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" '
        f'height="{y + 10}">',
        f'<rect width="{WIDTH}" height="{y + 10}" fill="#ffffff"/>',
        *_axis(y),
        *_legend(figures),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _faults(figures: WitnessFigures) -> Iterator[tuple[str, FaultFigures]]:
    for model in figures["models"]:
        yield from ((model["model"], fault) for fault in model["faults"])


def shown_set(fault: FaultFigures) -> ProblemSet:
    """The set that the fault costs most on."""
    return min(
        fault["with_fault"],
        key=lambda name: points(fault["right"][name], fault["with_fault"][name]),
    )


def _row(y: int, model: str, fault: FaultFigures) -> list[str]:
    name = fault["what"] + (" (emulated)" if fault["emulated"] else "")
    if fault["not_covered"] is not None:
        note = f"not covered here: {fault['not_covered']}"
        return [*_labels(y, name, model), _text(LEFT, y + 16, note, size=11, fill=PALE)]
    problems = shown_set(fault)
    form = ", historical form" if fault["historical"] else ""
    right, broken = fault["right"][problems], fault["with_fault"][problems]
    return [
        *_labels(y, name, f"{model}, {problems} problems{form}"),
        *_bar(y, right, RIGHT_COLOUR),
        *_bar(y + THICK + 2, broken, FAULT_COLOUR),
    ]


def _labels(y: int, name: str, below: str) -> list[str]:
    return [
        _text(LEFT - 12, y + 10, name, size=12, anchor="end"),
        _text(LEFT - 12, y + 23, below, size=10, anchor="end", fill=PALE),
    ]


def _bar(y: int, share: Share, colour: str) -> list[str]:
    width = BAR * share["accuracy"]
    low, high = (LEFT + BAR * end for end in share["interval"])
    middle = y + THICK / 2
    return [
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{THICK}" fill="{colour}"/>',
        f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="{INK}" '
        'stroke-width="1"/>',
        _text(
            round(max(high, LEFT + width)) + 6, y + 10, f"{100 * share['accuracy']:.0f} %", size=11
        ),
    ]


def _axis(bottom: int) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        x = LEFT + BAR * tenth // 10
        parts.append(f'<line x1="{x}" y1="56" x2="{x}" y2="{bottom - 12}" stroke="#e2e2e2"/>')
        parts.append(_text(x, 50, f"{10 * tenth} %", size=10, anchor="middle", fill=PALE))
    return parts


def _legend(figures: WitnessFigures) -> list[str]:
    words = f"Right answers in a mixed batch of {figures['batch']}, with 95 % intervals"
    parts = [_text(20, 26, words, size=15, weight="bold")]
    for x, colour, name in ((LEFT + 190, RIGHT_COLOUR, "without the fault"),
                            (LEFT + 340, FAULT_COLOUR, "with the fault")):  # fmt: skip
        parts.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 26, name, size=12))
    return parts


def _text(
    x: int,
    y: int,
    words: str,
    *,
    size: int = 13,
    weight: str = "normal",
    fill: str = INK,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'font-family="sans-serif" fill="{fill}" text-anchor="{anchor}">{escape(words)}</text>'
    )
