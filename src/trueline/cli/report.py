"""`trueline report`: what `trueline verify` found, shown again, or compared with another run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from trueline.cli.output import tables

Flag = Annotated[bool, Parameter(negative=())]

command = App(name="report", help="Show or compare what trueline verify found.")


@command.command
def show(
    file: Path,
    /,
    *,
    html: Path | None = None,
    junit: Path | None = None,
    quiet: Flag = False,
) -> None:
    """Show a report: verdict and coverage, every check beside its noise band and gate, failures
    with their place and replay file.

    Ends with exit code 0 whatever the report says: that was verify's exit code.

    Parameters
    ----------
    file
        What `trueline verify --json` wrote.
    html
        Also write it as one page that needs nothing else: to look at, print or attach to a bug
        report.
    junit
        Also write it as JUnit XML, which CI systems read.
    quiet
        Only the verdict, a line for each group, and what failed.
    """
    from trueline.verify import report
    from trueline.verify.report.html import page
    from trueline.verify.report.junit import junit_xml
    from trueline.verify.report.terminal import print_report

    found = report.read(file)
    for target, render in ((html, page), (junit, junit_xml)):
        if target is not None:
            report.write_file(target, render(found).encode())
    print_report(tables(), found, quiet=quiet)


@command.command(name="diff")
def diff_reports(
    a: Path,
    b: Path,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Compare two reports of a model: what is worse, and what changed around it.

    Ends with exit code 1 if something is worse: a check fails that did not, coverage was lost, a
    measure with a gate went up by more than its noise band, a known bug survives that was caught,
    or injected errors are seen less well by more than a factor of two. 2 if the reports are of
    different models.

    Parameters
    ----------
    a
        The earlier report, as `trueline verify --json` wrote it.
    b
        The later one.
    as_json
        Print one JSON object.
    """
    from trueline.verify import report
    from trueline.verify.report.diff import diff, require_comparable
    from trueline.verify.report.diff_terminal import print_diff

    before, after = report.read(a), report.read(b)
    require_comparable(before, after, (a, b))
    found = diff(before, after)
    if as_json:
        print(report.encode(found).decode())
    else:
        print_diff(tables(), before, after, found)
    return int(bool(found.worse))
