"""Progress of long work, on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

SECONDS_BETWEEN_LINES = 3.0
UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def human_bytes(size: float) -> str:
    """1 KB = 1000 B."""
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size /= 1000
        unit += 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.3g} {UNITS[unit]}"


def human_count(count: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.4g}"


@contextmanager
def progress_bar(title: str, in_bytes: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar with speed on a terminal; elsewhere a line every few seconds."""
    if not sys.stderr.isatty():
        yield _progress_lines(title, human_bytes if in_bytes else human_count)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    columns[2:2] = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def lines_between(file: TextIO, seconds: float) -> Callable[[str], None]:
    """Prints what it is told, so many seconds after the line before at the earliest."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            print(line, file=file, flush=True)

    return tell


def _progress_lines(title: str, show: Callable[[float], str]) -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            part = f"{show(done)} of {show(total)}, {show(done / (now - start))}/s"
            print(f"{title}: {100 * done // max(total, 1)} % ({part})", file=sys.stderr)

    return report


@contextmanager
def generation_progress(total: int, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Called with (requests done, tokens of the one just done)."""
    if not show:
        yield lambda done, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    start = time.monotonic()
    count = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, speed="")

        def report(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            rate = count / max(time.monotonic() - start, 1e-9)
            progress.update(task, completed=done, speed=f"{rate:.0f} tokens/s")

        yield report
