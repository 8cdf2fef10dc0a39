"""Put each mutant into a copy of the source, alone, and run the tests that must go red; with
--verify, what a user would run instead: `trueline verify` on tiny models."""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants import page, user_runs
from mutants.children import Child, start, tests
from mutants.listed import ROOT, SOURCE, Mutant, load
from mutants.pool import CannotRun, beside_each_other, mutated_source

TESTS_FAILED = 1  # pytest's exit status; others mean that it could not run them


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    word: str
    test: str
    seconds: float


def main() -> int:
    options = _options()
    changed = _changed(options.changed) if options.changed else None
    mutants = [m for m in load() if _is_wanted(m, options, changed)]
    if not mutants:
        raise CannotRun("no mutant is selected")
    began = time.monotonic()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        pristine = Path(scratch, "pristine")
        shutil.copytree(SOURCE, pristine / "trueline", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(pristine, quiet=1)  # once, not in every copy
        if options.verify:
            return user_runs.main(mutants, pristine, Path(scratch), options)
        if not options.no_baseline:
            _baseline(mutants, pristine, Path(scratch), options.jobs)
        for outcome in _run_all(mutants, pristine, Path(scratch), options):
            found.append(outcome)
            mutant, number = outcome.mutant, f"{len(found)}/{len(mutants)}"
            print(
                f"{number:>7} {outcome.seconds:5.0f} s  {mutant.area}: {mutant.id}: "
                f"{outcome.word} {outcome.test}",
                flush=True,
            )
            if options.write_docs:  # at once: a run that is interrupted was not for nothing
                page.write(load(), {mutant.id: (outcome.word, outcome.test)})
    return _report(mutants, found, time.monotonic() - began)


def _report(mutants: list[Mutant], found: list[Outcome], seconds: float) -> int:
    results = {outcome.mutant.id: (outcome.word, outcome.test) for outcome in found}
    print("\n" + "\n".join(page.by_area(mutants, results)))
    alive = [outcome for outcome in found if outcome.word not in page.DEAD]
    for outcome in alive:
        mutant = outcome.mutant
        print(f"\n{outcome.word}: {mutant.id} in {mutant.file}: {mutant.meets}")
        print(f"- {mutant.old}\n+ {mutant.new}\n  {' '.join(mutant.tests)}")
    print(f"\n{len(found) - len(alive)} of {len(found)} killed in {seconds:.0f} s")
    return 1 if alive else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants")
    parser.add_argument("--area", nargs="+", help="mutants of these areas")
    parser.add_argument("--changed", metavar="REV", help="mutants in files that differ from REV")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds for each; 300 unless told"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="the tests are known to be green"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="bring docs/mutants.md up to date; with --verify docs/verify-mutants.md",
    )
    parser.add_argument(
        "--verify", action="store_true", help="run trueline verify instead of the tests"
    )
    parser.add_argument(
        "--models",
        type=int,
        default=3,
        help="with --verify: how many models a survivor is tried on; 3 unless told",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="with --verify: what is found stays there, and what is there is not run again",
    )
    return parser.parse_args()


def _is_wanted(mutant: Mutant, options: argparse.Namespace, changed: list[str] | None) -> bool:
    if options.only and mutant.id not in options.only:
        return False
    if options.area and mutant.area not in options.area:
        return False
    return changed is None or str(mutant.path.relative_to(ROOT)) in changed


def _changed(revision: str) -> list[str]:
    command = ["git", "diff", "--name-only", revision]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"--changed {revision}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def _tests(names: Iterable[str]) -> list[str]:
    return [f"tests/{name}" for name in dict.fromkeys(names)]


def _baseline(mutants: list[Mutant], source: Path, scratch: Path, jobs: int) -> None:
    """Without a mutant all of them are green."""
    names = _tests(test for mutant in mutants for test in mutant.tests)
    print(f"without a mutant: {len(names)} tests and files", flush=True)
    place = scratch / "baseline"
    place.mkdir()
    child = start(source, place, tests(names, "-n", str(jobs)), native=False)
    while (status := child.status()) is None:
        time.sleep(0.1)
    if status:
        raise CannotRun(f"the tests are red, or missing, without any mutant:\n{child.output()}")
    print(child.output().strip().splitlines()[-1], flush=True)


def _run_all(
    mutants: list[Mutant], pristine: Path, scratch: Path, options: argparse.Namespace
) -> Iterator[Outcome]:
    def begin(mutant: Mutant) -> Child:
        place = scratch / mutant.id
        source = mutated_source(mutant, pristine, place)
        return start(source, place, tests(_tests(mutant.tests), "-x"), native=mutant.is_native)

    for mutant, child, status in beside_each_other(
        mutants, begin, jobs=options.jobs, limit=options.limit
    ):
        word, test = _verdict(mutant, status, child.output())
        shutil.rmtree(scratch / mutant.id, ignore_errors=True)
        yield Outcome(mutant, word, test, child.seconds)


def _verdict(mutant: Mutant, status: int | None, output: str) -> tuple[str, str]:
    if status is None:
        return (page.HUNG if mutant.hangs else page.OUT_OF_TIME), ""
    if status == 0:
        return page.SURVIVED, ""
    if status < 0:  # memory that is not its own, say: red on any machine that notices
        return page.CRASHED, signal.Signals(-status).name
    # The name of a case may hold blanks; the reason comes after " - ".
    red = re.search(r"^(?:FAILED|ERROR) tests/(.+?::.+?)(?: - .*)?$", output, re.MULTILINE)
    if status != TESTS_FAILED or red is None:
        print(f"{mutant.id}: pytest ended with {status}:\n{output[-2000:]}", flush=True)
        return page.NOT_RUN, ""
    return page.KILLED, red[1].replace("|", "/")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends as well
    try:
        sys.exit(main())
    except CannotRun as error:
        sys.exit(f"make mutants: {error}")
