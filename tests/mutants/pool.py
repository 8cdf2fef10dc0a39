"""Copies of the source with a mutant in them, and children that run beside each other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from mutants.children import Child
from mutants.listed import Mutant

T = TypeVar("T")


class CannotRun(Exception):
    """The list, the tests or the environment are at fault, not the checks."""


def mutated_source(mutant: Mutant, pristine: Path, place: Path) -> Path:
    source = place / "src"
    # Hard links: what is compiled stays valid, and only the mutated file is new.
    shutil.copytree(pristine, source, copy_function=os.link)
    mutated = source / "trueline" / mutant.file
    text = mutated.read_text()
    if text.count(mutant.old) != 1:
        raise CannotRun(f"{mutant.id}: its text stands {text.count(mutant.old)} times")
    mutated.unlink()
    mutated.write_text(text.replace(mutant.old, mutant.new))
    return source


def beside_each_other(
    todo: Sequence[T], start: Callable[[T], Child], *, jobs: int, limit: float
) -> Iterator[tuple[T, Child, int | None]]:
    """As they end, with the exit status; None: out of time."""
    running: list[tuple[T, Child]] = []
    waiting = list(reversed(todo))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append((waiting[-1], start(waiting.pop())))
            time.sleep(0.05)
            for each, child in list(running):
                status = child.status()
                if status is None and child.seconds < limit:
                    continue
                child.end()
                if status is None:
                    os.waitpid(child.pid, 0)
                running.remove((each, child))
                yield each, child, status
    finally:
        for _, child in running:
            child.end()
