"""The page of a report: it needs nothing else, what somebody else wrote stays text, and its charts
draw the numbers they were given."""

from __future__ import annotations

import math
import re
from functools import cache
from html.parser import HTMLParser

import pytest

import reports
from trueline.verify.report import Alternative, Curve, Place, Report, Status, TokenDiff, charts
from trueline.verify.report.html import page, token_rows

VOID = {"meta", "link", "br"}
TAGS = {
    *("html", "head", "meta", "link", "title", "style", "body", "header", "nav", "main", "section"),
    *("footer", "h1", "h2", "h3", "p", "span", "div", "b", "i", "br", "small", "a", "ul", "li"),
    *("dl", "dt", "dd", "details", "summary", "table", "thead", "tr", "th", "td", "code", "pre"),
    *("figure", "figcaption", "svg", "g", "path", "circle", "rect", "text"),
}
"""Whatever else there is came out of a report: a script first of all."""
HOSTILE = "</script><b>&\"'\\x1b[31m\\x00\\u202e[bold]{{7*7}}]]>\\ud800"
NAN, INF = math.nan, math.inf


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.chunks: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes what was not open"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open[-1:]:
            self.chunks.append(data)

    def classes(self, tag: str) -> list[str]:
        return [each.get("class", "") for name, each in self.elements if name == tag]

    @property
    def words(self) -> str:
        """One space between any two."""
        return " ".join(" ".join(self.chunks).split())


@cache
def written(name: str) -> str:
    return page(reports.ALL[name]())


@cache
def parsed(name: str) -> Page:
    found = Page()
    found.feed(written(name))
    found.close()
    assert found.open == []
    return found


@pytest.mark.parametrize("name", reports.ALL)
def test_it_needs_nothing_else_and_runs_nothing(name: str) -> None:
    text = written(name)
    found = parsed(name)
    for tag, attributes in found.elements:
        assert tag in TAGS
        for attribute, value in attributes.items():
            assert not attribute.startswith("on")
            if attribute in ("href", "src", "action", "srcset"):
                assert value.startswith("#") or value == "data:,"
            if attribute == "style":
                assert re.fullmatch(r"(--cells|--cards|flex-grow|width):[\d.]+%?", value)
    sheet = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in sheet
    assert "@import" not in sheet
    assert "default-src 'none'" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", text)


@pytest.mark.parametrize("name", reports.ALL)
def test_links_lead_somewhere_and_charts_have_numbers(name: str) -> None:
    found = parsed(name)
    ids = [each["id"] for _, each in found.elements if "id" in each]
    assert len(ids) == len(set(ids))
    links = [each["href"] for tag, each in found.elements if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    for tag, attributes in found.elements:
        if tag in ("path", "circle", "rect", "text"):
            numbers = " ".join(attributes.get(key, "") for key in ("d", "x", "y", "cx", "cy", "r"))
            assert not re.search("nan|inf|None", numbers), attributes


def test_what_others_wrote_is_text() -> None:
    found = parsed("hostile")
    assert found.words.count(HOSTILE) > 40
    assert "49" not in found.words, "nothing of it is a template"
    titles = [each.get("title", "") for _, each in found.elements]
    assert any(HOSTILE in title for title in titles)


def test_verdict_and_coverage_come_first() -> None:
    words = parsed("failing").words
    assert re.search(r"FAILED witness-v3 .* 1 failed · 1 error · 22 passed · 4 not covered", words)
    assert "First wrong: layer 3, mixer, attention=native, request 2, position 17" in words
    order = ["FAILED", "First wrong", "Not covered nothing is known", "What this run would have"]
    order += ["Errors beside", "Tokens that differ", "Noise bands", "Environment and plan"]
    places = [words.index(each) for each in order]
    assert places == sorted(places)


def test_not_covered_never_looks_like_passed() -> None:
    found = parsed("passing")
    cells = found.classes("i")
    assert cells.count("uncovered") == 4
    assert cells.count("passed") == 24
    shown = [each for tag, each in found.elements if tag == "i" and "title" in each]
    assert all((each["class"] == "uncovered") == ("not covered" in each["title"]) for each in shown)
    assert "no CUDA device here modes/captured, modes/capture size - 1" in found.words
    assert "NOTHING PASSED" in parsed("empty").words


def test_a_run_without_power_says_so() -> None:
    assert "how small an error it would have noticed is not known" in written("empty")
    assert "is not known" not in written("passing")
    words = parsed("passing").words
    assert "softmax scale too large by this factor: 2⁻⁸ in layer 0" in words
    assert "not noticed: weight of the first expert, of its size: 2⁻¹ in layer 1" in words


def test_a_failure_can_be_run_again() -> None:
    words = parsed("failing").words
    assert "trueline replay 'verify-failures/mixed step.replay'" in words
    assert "trueline verify witness-v3 --device cpu --html verify.html" in words
    assert "worst row 0.41 8.1e-4 3.2e-3" in words


def test_numbers_are_not_broken() -> None:
    text = written("passing")
    assert '(band <span class="whole">9.1e-4</span>, accepted' in text
    assert "9.1e-4" in parsed("passing").words


def test_survivors_are_in_the_head() -> None:
    words = parsed("with_faults").words
    told = "Known bugs, switched on: 1 survived , 30 caught, 1 no effect, 1 not here"
    assert words.index(told) < words.index("Not covered nothing")


def test_a_large_one_stays_small() -> None:
    report = reports.huge(checks=40)
    text = page(report)
    assert len(text) < 2_000_000
    assert text.count('<i class="passed" title') == report.counts()[Status.PASSED]


def test_sections_without_content_are_left_out() -> None:
    ids = [each["id"] for _, each in parsed("empty").elements if "id" in each]
    assert ids == ["uncovered", "checks", "run"]


# -- charts ------------------------------------------------------------------------------


def drawn(curve: Curve, kind: str) -> list[tuple[float, float]]:
    """Where circles of a class are."""
    found = Page()
    found.feed(charts.chart(curve))
    return [
        (float(each["cx"]), float(each["cy"]))
        for tag, each in found.elements
        if tag == "circle" and each["class"] == kind
    ]


def curve(values: list[float], along: str = "layer", gate: float = 1.0) -> Curve:
    return Curve(
        title="t",
        along=along,
        labels=[str(i) for i in range(len(values))],
        values=values,
        band=[gate / 10] * len(values),
        gate=[gate] * len(values),
    )


def test_an_axis_is_logarithmic() -> None:
    axis = charts.Axis(-3, 1, 0.0, 400.0)
    assert [axis.at(value) for value in (1e-3, 1e-2, 0.1, 10.0)] == [0, 100, 200, 400]
    assert axis.at(10**-1.5) == 150
    assert [axis.at(value) for value in (0.0, 1e-9, 1e9, NAN, INF)] == [0, 0, 400, 400, 400]
    assert [label for _, label in axis.ticks()] == ["10⁻³", "10⁻²", "10⁻¹", "10⁰", "10¹"]


@pytest.mark.parametrize("values", [[1e-300, 1e300], [1.0], [0.0], [NAN], [1e-3, 2e-3]])
def test_an_axis_has_room_for_what_it_shows(values: list[float]) -> None:
    axis = charts.Axis.of(charts.points(curve(values)), 0.0, 100.0)
    assert 2 <= axis.high - axis.low <= charts.DECADES
    assert len(list(axis.ticks())) <= 6
    for value in (*values, 1.0):
        assert 0 <= axis.at(value) <= 100


def test_what_is_above_its_gate_is_marked() -> None:
    made = curve([0.5, 2.0, 0.0, 1.0])
    (bad,), (zero,) = drawn(made, "bad"), drawn(made, "zero")
    good = drawn(made, "good")
    assert len(good) == 2
    assert bad[1] < good[1][1] < good[0][1] < zero[1] == charts.BOTTOM
    gate = re.search(r'class="gate" d="M[\d.]+ ([\d.]+)', charts.chart(made))
    assert gate is not None
    assert bad[1] < float(gate[1]) == good[1][1]


def test_neighbours_never_hide_what_stands_out() -> None:
    values = [0.5] * 5000
    values[3210] = 1.01
    (bad,) = drawn(curve(values, "position"), "bad")
    assert bad[0] == pytest.approx(46 + (370 - 46) * 3210 / 5000, abs=4)
    values[3210] = NAN
    assert 'class="bad cross"' in charts.chart(curve(values, "position"))
    made = curve([0.5] * 60 + [0.9] + [0.5] * 60, "position")
    made.gate[60] = 0.5
    assert len(drawn(made, "bad")) == 1, "a lower gate of its own"


def test_a_chart_in_words() -> None:
    assert charts.caption(curve([0.1, 0.5])) == (
        "nearest to its gate: layer 1, 0.5 (band 0.1, accepted 1)"
    )
    assert charts.caption(curve([2.0, NAN, 0.1])) == (
        "2 of 3 above what is accepted; worst: layer 1, NaN (band 0.1, accepted 1)"
    )
    assert "worst: '1', inf" in charts.caption(curve([0.1, INF], "composition"))
    assert charts.caption(curve([])) == "nothing was measured"
    uneven = Curve(title="", along="layer", labels=[], values=[1.0, 2.0], band=[], gate=[1.5])
    assert charts.caption(uneven) == ("nearest to its gate: layer 0, 1 (accepted 1.5)"), (
        "without a gate nothing is wrong"
    )


def test_many_compositions_show_the_worst() -> None:
    made = curve([0.5] * 90 + [3.0], "composition")
    chart = charts.chart(made)
    assert len(drawn(made, "bad")) == 1
    assert chart.count('class="name"') == charts.MOST_ROWS


def test_heat_maps_grade_by_share_of_what_is_accepted() -> None:
    cells = charts.error_cells(curve([0.0, 0.05, 0.1, 0.2, 0.4, 0.9, 1.0, 1.1, NAN, INF]))
    levels = [cell.level for cell in cells]
    assert levels == ["h0", "h1", "h1", "h2", "h3", "h4", "h4", "over", "over", "over"]
    assert cells[7].told == "layer 7: 1.1 (band 0.1, accepted 1)"


def test_places_where_nothing_was_seen_stand_out() -> None:
    text = written("passing")
    strips = re.findall(r'<svg class="strip".*?</svg>', text)
    power = [each for each in strips if "the smallest seen" in each]
    assert [re.findall('rect class="([^"]+)"', each) for each in power] == [
        ["h2", "h1", "h1", "h2"],
        ["h2", "over", "h2", "h2"],
    ]
    assert "<title>not seen: weight of the first expert" in power[1]
    assert "strips, by layer" in text
    assert "strips, by layer" not in written("hostile"), "one place makes no strip"


def test_tokens_of_both_sides_are_compared() -> None:
    diff = TokenDiff(
        place=Place(),
        before="",
        ours=[Alternative(1, " a", math.log(0.75)), Alternative(2, "b", NAN)],
        reference=[Alternative(3, "c", 0.0), Alternative(1, " a", -INF)],
        kl=1.0,
    )
    rows = [(row.token, row.text, row.ours, row.reference) for row in token_rows(diff)]
    assert rows == [
        (3, "c", "not in its top-k", "100 %"),
        (1, "␣a", "75 %", "0 %"),
        (2, "b", "NaN", "not in its top-k"),
    ]
    assert [row.ours_width for row in token_rows(diff)] == [0, pytest.approx(75), 0]


def test_a_report_is_not_changed_by_showing_it() -> None:
    report: Report = reports.failing()
    page(report)
    assert report == reports.failing()
