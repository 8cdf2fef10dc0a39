"""A report as text for a terminal: verdict and coverage first, then what they rest on."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueline.verify.report import Check, FaultRow, Report, Status, wording

STYLES = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.ERROR: "bold magenta",
    Status.NOT_COVERED: "yellow",
}
WIDE, MANY_CHECKS = 100, 200
MOST_CHECKS, MOST_FAILURES, MOST_LINES, MOST_ROWS = 16, 12, 12, 24
"""Of a group that are listed; shown with their evidence; lines of it; rows of other tables. The
page has all of them."""


def print_report(console: Console, report: Report, *, quiet: bool = False) -> None:
    """`quiet`: one line a group, and what failed."""
    _print_verdict(console, report)
    if quiet:
        _print_groups(console, report)
        for check in report.failed:
            print_wrapped(console, _failure_line(check), "  ")
        return
    _print_not_covered(console, report)
    _print_unusual(console, report.unusual)
    _print_checks(console, report)
    _print_failures(console, report.failed)
    _print_power(console, report)
    _print_bands(console, report)
    _print_faults(console, report.faults)
    _print_run(console, report)


# -- parts that other tables need too ----------------------------------------------------


def heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def row(rows: Table, *cells: str | Text) -> None:
    """Of texts that may look like markup."""
    rows.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))


def print_wrapped(
    console: Console, text: Text | str, indent: str = "", hanging: str = "  ", label: str = ""
) -> None:
    """The lines after the first further in, and a label before the first."""
    body = Text(text) if isinstance(text, str) else text
    wrapped = body.wrap(console, max(console.width - len(indent + hanging), 20))
    start = Text(indent) + Text(label.ljust(len(hanging)) if label else "", "bold")
    for index, each in enumerate(wrapped):
        console.print((Text(indent + hanging) if index else start) + each, soft_wrap=True)


def _more(hidden: int, what: str) -> str:
    return f"… and {wording.count(hidden, f'more {what}')}"


# -- verdict and coverage ----------------------------------------------------------------


def _print_verdict(console: Console, report: Report) -> None:
    verdict = wording.verdict(report)
    style = "bold green" if verdict.good else "bold red"
    head = Text.assemble(
        (verdict.word, style),
        f"  {wording.line(report.model.name)}: {verdict.sentence} ",
        f"({wording.asked_for(report)}, {wording.seconds(report.seconds)})",
    )
    print_wrapped(console, head)
    print_wrapped(console, wording.subject(report.model), "  ")
    if wrong := wording.first_wrong(report):
        at = wording.where(wrong.place) or "no place named"
        print_wrapped(console, Text(f"first wrong: {at} ({wording.clean(wrong.id)})", "bold"), "  ")


def _print_groups(console: Console, report: Report) -> None:
    grid = Table.grid(padding=(0, 2))
    for group in wording.groups(report.checks):
        style = STYLES[Status.FAILED] if group.bad else ""
        counts = Text(wording.counted(group.counts), style=style)
        row(grid, f"  {wording.clean(group.name)}", counts, wording.seconds(group.seconds))
    console.print(grid)


def _failure_line(check: Check) -> Text:
    head = Text(f"{check.status}: {wording.clean(check.id)}", STYLES[check.status])
    told = wording.finding(check.place, check.evidence)
    return head + Text(f": {told}" if told else "")


def _print_not_covered(console: Console, report: Report) -> None:
    reasons = wording.not_covered(report)
    if not reasons:
        return
    heading(console, "Not covered: nothing is known of these")
    for reason, checks in reasons.items():
        shown = ", ".join(checks[:MOST_CHECKS])
        if len(checks) > MOST_CHECKS:
            shown += f" {_more(len(checks) - MOST_CHECKS, 'check')}"
        print_wrapped(console, Text(f"{reason}: ", STYLES[Status.NOT_COVERED]) + Text(shown), "  ")


def _print_unusual(console: Console, told: list[str]) -> None:
    if told:
        heading(console, wording.UNUSUAL)
    for each in told[:MOST_ROWS]:
        print_wrapped(console, wording.clean(each), "  ")
    if len(told) > MOST_ROWS:
        print_wrapped(console, _more(len(told) - MOST_ROWS, "weight"), "  ")


# -- checks ------------------------------------------------------------------------------


def _print_checks(console: Console, report: Report) -> None:
    heading(console, "Checks, each with its measure that is nearest to what is accepted")
    widths = _widths(console, report.checks)
    found = wording.groups(report.checks)
    most = MOST_CHECKS if len(report.checks) <= MANY_CHECKS else 2
    head: list[tuple[str | Text, ...]] = [tuple(Text(each, "dim") for each in COLUMNS)]
    for group in found:
        title = f"{wording.clean(group.name)}: {wording.counted(group.counts)}"
        print_wrapped(console, Text(f"{title}, {wording.seconds(group.seconds)}", "bold"))
        shown, hidden = _shown(group.checks, most)
        if shown:
            console.print(_grid([*head, *map(_cells, shown)], widths))
            head = []
        if hidden:
            console.print(f"  … and {hidden}")


def _grid(lines: list[tuple[str | Text, ...]], widths: list[int]) -> Table:
    rows = Table.grid(padding=(0, 1))
    for index, width in enumerate(widths):
        numbers = index >= NUMBERS
        rows.add_column(
            width=width, justify="right" if numbers else "left", overflow="fold", no_wrap=numbers
        )
    for each in lines:
        row(rows, *each[: len(widths)])
    return rows


COLUMNS = ("  check", "", "measure", "value", "band", "accepted", "time", "layer")
NUMBERS = 3
"""The first column of them."""


def _widths(console: Console, checks: list[Check]) -> list[int]:
    """The same in all groups. What 80 columns have no room for is on the page."""
    fixed = [11, 9, 8, 8]
    widths = fixed + ([9, 5] if console.width >= WIDE else [])
    room = console.width - sum(widths) - len(widths) - 1
    name = max((len(wording.short_id(check)) for check in checks), default=5) + 2
    measure = max((len(each.name) for check in checks for each in check.measures), default=0)
    first = min(name, max(room * 3 // 5, 12, room - measure))
    return [first, widths[0], min(max(room - first, 8), max(measure, 8)), *widths[1:]]


def _cells(check: Check) -> tuple[str | Text, ...]:
    status = Text(str(check.status), STYLES[check.status])
    found = wording.worst(check.measures)
    name = f"  {wording.short_id(check)}"
    if found is None:
        return name, status, "", "", "", "", wording.seconds(check.seconds), ""
    layer = found.place.layer if found.place is not None else None
    return (
        *(name, status, wording.clean(found.name), *wording.figures(found)),
        *(wording.seconds(check.seconds), "" if layer is None else str(layer)),
    )


def _shown(checks: list[Check], most: int) -> tuple[list[Check], str]:
    """Of a large group those that failed and those nearest to their gates, and what is left out."""
    bad = [check for check in checks if check.status in (Status.FAILED, Status.ERROR)]
    passed = [check for check in checks if check.status == Status.PASSED]
    near = sorted(passed, key=_severity, reverse=True)[:most]
    kept = {id(check) for check in [*bad[:MOST_CHECKS], *near]}
    hidden = {
        "more that passed": len(passed) - len(near),
        "more that failed": max(len(bad) - MOST_CHECKS, 0),
    }
    told = " and ".join(f"{many:,} {what}" for what, many in hidden.items() if many)
    return [check for check in checks if id(check) in kept], told


def _severity(check: Check) -> float:
    found = wording.worst(check.measures)
    return wording.severity(found) if found else -2.0


def _print_failures(console: Console, failed: list[Check]) -> None:
    if not failed:
        return
    heading(console, "What is wrong")
    for index, check in enumerate(failed[:MOST_FAILURES]):
        if index:
            console.print()
        title = f"{wording.clean(check.id)}: {wording.clean(check.what)}"
        print_wrapped(console, Text(title, STYLES[check.status]), "  ")
        facts = dict(_facts(check))
        hanging = " " * min(max(map(len, facts), default=0) + 2, 24)
        for label, value in facts.items():
            print_wrapped(console, value, "    ", hanging, label)
        lines = wording.clean(check.evidence).splitlines()
        for text in lines[:MOST_LINES]:
            print_wrapped(console, text, "    ")
        if len(lines) > MOST_LINES:
            print_wrapped(console, _more(len(lines) - MOST_LINES, "line"), "    ")
    if others := failed[MOST_FAILURES:]:
        names = ", ".join(wording.clean(check.id) for check in others[:MOST_ROWS])
        print_wrapped(console, f"{_more(len(others), 'check')}: {names}", "  ")


def _facts(check: Check) -> Iterator[tuple[str, str]]:
    if check.place is not None:
        yield "place", wording.where(check.place)
    if check.ran:
        yield "ran", wording.clean(", ".join(f"{op}={name}" for op, name in check.ran.items()))
    for measure in check.measures:
        if not measure.good:
            yield wording.clean(measure.name), wording.measured(measure)
    if check.replay:
        yield "replay", wording.replay_command(check.replay)


# -- what it would have noticed, and the rest ---------------------------------------------


def _print_power(console: Console, report: Report) -> None:
    summaries = wording.power_summaries(report.power)
    for title, told, style in (
        ("This run would have noticed", wording.noticed, ""),
        ("It would not have noticed", wording.not_noticed, STYLES[Status.NOT_COVERED]),
    ):
        sentences = [sentence for summary in summaries if (sentence := told(summary))]
        if sentences:
            heading(console, title)
        for sentence in sentences:
            print_wrapped(console, Text(sentence, style), "  ")


def _print_bands(console: Console, report: Report) -> None:
    if not report.bands:
        return
    heading(
        console, "Noise bands: relative error of the worst row, or the median one, against float64"
    )
    rows = table("of", "dtype", "band", "accepted")
    for band in report.bands[:MOST_ROWS]:
        values = wording.number(band.value), wording.number(band.gate)
        row(rows, wording.clean(band.what), wording.clean(band.dtype), *values)
    if len(report.bands) > MOST_ROWS:
        row(rows, _more(len(report.bands) - MOST_ROWS, "band"))
    console.print(rows)


def _print_faults(console: Console, faults: list[FaultRow]) -> None:
    if not faults:
        return
    by_outcome = wording.outcomes(faults)
    counts = ", ".join(f"{len(rows)} {outcome}" for outcome, rows in by_outcome.items())
    heading(console, f"Known bugs, switched on one at a time: {wording.clean(counts)}")
    rows = table("fault", "outcome", "caught by", "layer")
    shown = [fault for outcome in by_outcome for fault in by_outcome[outcome]]
    for fault in shown[:MOST_ROWS]:
        style = STYLES[Status.FAILED] if fault.outcome == "survived" else ""
        by = wording.clean(fault.caught_by or wording.line(fault.evidence, 80))
        layer = wording.clean(fault.layer) if fault.outcome == "caught" else ""
        row(rows, wording.clean(fault.id), Text(wording.clean(fault.outcome), style), by, layer)
    console.print(rows)
    if len(shown) > MOST_ROWS:
        console.print(f"  {_more(len(shown) - MOST_ROWS, 'fault')}")


def _print_run(console: Console, report: Report) -> None:
    heading(console, "Where, and how")
    for label, value in wording.run_facts(report):
        print_wrapped(console, value, "  ", " " * 13, label)
    if report.plan:
        heading(console, "Plan")
        for each in report.plan:
            print_wrapped(console, wording.clean(each), "  ", " " * 13)
