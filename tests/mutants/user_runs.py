"""`make mutants OPTIONS="--verify"`: which mutants a user's own run of `trueline verify` would have
caught, without our tests. docs/verify-mutants.md."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import time
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from mutants import user_page
from mutants.children import Child, start
from mutants.listed import SOURCE, Mutant, load
from mutants.patients import PATIENTS, Patient, concerned, examined, healthy, make_models
from mutants.pool import CannotRun, beside_each_other, mutated_source
from mutants.reach import wanted


@dataclass(frozen=True)
class Kept:
    """What stands in the directory of --keep: models, what runs without a mutant reach, results."""

    directory: Path

    @property
    def models(self) -> Path:
        return self.directory / "models"

    def reach_file(self, patient: Patient) -> Path:
        return self.directory / f"reach of {patient.name}.json"

    def result(self, mutant: Mutant) -> user_page.Result | None:
        file = self._result_file(mutant)
        return user_page.Result(*json.loads(file.read_text())) if file.exists() else None

    def keep(self, mutant: Mutant, result: user_page.Result) -> None:
        self._result_file(mutant).write_text(json.dumps(result.cells()))

    def _result_file(self, mutant: Mutant) -> Path:
        """Of this text of it."""
        digest = blake2b((mutant.old + "\0" + mutant.new).encode(), digest_size=4).hexdigest()
        return self.directory / f"{mutant.id}-{digest}.json"


def main(mutants: list[Mutant], pristine: Path, scratch: Path, options: argparse.Namespace) -> int:
    mutants = [mutant for mutant in mutants if user_page.is_in_reach(mutant)]
    if not mutants:
        raise CannotRun("a run of trueline verify meets none of these mutants, by their nature")
    kept = Kept(options.keep or scratch / "kept")
    kept.models.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    results = {m.id: found for m in mutants if (found := kept.result(m)) is not None}
    waiting: list[tuple[Mutant, list[Patient]]] = []
    if todo := [mutant for mutant in mutants if _is_unfinished(results.get(mutant.id), options)]:
        reached = _reached(kept, pristine, scratch, options)
        for mutant in sorted(todo, key=lambda mutant: mutant.is_native):  # those compile
            tried = results[mutant.id].tried if mutant.id in results else ()
            every = _patients(mutant, reached)[: options.models]
            if patients := [patient for patient in every if patient.name not in tried]:
                waiting.append((mutant, patients))
            elif not every:
                results[mutant.id] = user_page.Result(user_page.not_reached(mutant), "", "", "")
                kept.keep(mutant, results[mutant.id])
    if options.write_docs:
        user_page.write(load(), results)

    def begin(todo: tuple[Mutant, list[Patient]]) -> Child:
        mutant, patients = todo
        place = scratch / mutant.id
        source = mutated_source(mutant, pristine, place)
        run = examined(mutant, patients, kept.models, place / "found.json")
        return start(source, place, run, native=mutant.is_native)

    done = 0
    for (mutant, _), child, status in beside_each_other(
        waiting, begin, jobs=options.jobs, limit=options.limit
    ):
        place, done = scratch / mutant.id, done + 1
        result = _result(mutant, status, place / "found.json", child.output())
        if result.outcome == user_page.SURVIVED and mutant.id in results:
            result = replace(result, models=f"{results[mutant.id].models}; {result.models}")
        shutil.rmtree(place, ignore_errors=True)
        number = f"{done}/{len(waiting)}"
        print(f"{number:>7} {child.seconds:5.0f} s  {mutant.area}: {mutant.id}: {result.line()}",
              flush=True)  # fmt: skip
        if result.outcome == user_page.NOT_RUN:
            continue
        results[mutant.id] = result
        kept.keep(mutant, result)
        if options.write_docs:
            user_page.write(load(), results)
    print("\n" + "\n".join(user_page.by_area(mutants, results)))
    print(f"\n{user_page.headline(mutants, results)}, in {time.monotonic() - began:.0f} s")
    return int(any(mutant.id not in results for mutant in mutants))


def _is_unfinished(result: user_page.Result | None, options: argparse.Namespace) -> bool:
    return result is None or (
        result.outcome == user_page.SURVIVED and len(result.tried) < options.models
    )


def _result(mutant: Mutant, status: int | None, file: Path, output: str) -> user_page.Result:
    found = json.loads(file.read_text()) if file.exists() else {"tried": []}
    tried = found["tried"]
    if status is None or status < 0:
        word = user_page.HANGS if status is None else user_page.CRASHES
        why = "" if status is None else signal.Signals(-status).name
        return user_page.Result(word, tried[-1] if tried else "", "", why)
    if status or not tried:
        print(f"{mutant.id}: the run ended with {status}:\n{output[-2000:]}", flush=True)
        return user_page.Result(user_page.NOT_RUN, "", "", "")
    if "red" in found:
        invariant, check = found["red"]
        return user_page.Result(user_page.CAUGHT, tried[-1], invariant, check)
    return user_page.Result(user_page.SURVIVED, "; ".join(tried), "", "")


def _patients(mutant: Mutant, reached: dict[str, set[str]]) -> list[Patient]:
    """Models whose run comes to what the mutant changes. Of C++ it is not known."""
    if mutant.is_native:
        names = ("v3-near", "v4-shallow", "glm5", "bf16", "fp8-exempt", "int4", "v4-fp4")
        return [patient for patient in PATIENTS if patient.name in names]
    reaching = [patient for patient in PATIENTS if mutant.id in reached[patient.name]]
    return concerned(mutant, reaching)


def _reached(
    kept: Kept, pristine: Path, scratch: Path, options: argparse.Namespace
) -> dict[str, set[str]]:
    """By model, in a run without a mutant, in which nothing fails."""
    every = [mutant for mutant in load() if user_page.is_in_reach(mutant)]
    digest = blake2b(digest_size=8)
    for file in sorted(SOURCE.rglob("*.py")):
        digest.update(file.read_bytes())
    for mutant in every:
        digest.update(f"{mutant.id}\0{mutant.old}\0{mutant.new}\0".encode())
    version = kept.directory / "version"
    if not version.exists() or version.read_text() != digest.hexdigest():
        for patient in PATIENTS:
            kept.reach_file(patient).unlink(missing_ok=True)
        version.write_text(digest.hexdigest())
    place = scratch / "models"
    place.mkdir()
    child = start(pristine, place, make_models(kept.models), native=False)
    while (status := child.status()) is None:
        time.sleep(0.1)
    if status:
        raise CannotRun(f"the models cannot be made:\n{child.output()}")
    lines = wanted(every)

    def begin(patient: Patient) -> Child:
        place = scratch / patient.name
        place.mkdir()
        run = healthy(patient, kept.models, lines, kept.reach_file(patient))
        return start(pristine, place, run, native=False)

    todo = [patient for patient in PATIENTS if not kept.reach_file(patient).exists()]
    for patient, child, status in beside_each_other(
        todo, begin, jobs=options.jobs, limit=4 * options.limit
    ):
        print(f"{child.seconds:13.0f} s  {patient.name}, without a mutant", flush=True)
        if status != 0:
            raise CannotRun(f"{patient.name}: ended with {status}:\n{child.output()}")
    found = {}
    for patient in PATIENTS:
        row = json.loads(kept.reach_file(patient).read_text())
        if row["red"]:
            kept.reach_file(patient).unlink()
            raise CannotRun(f"{patient.name}: fails without any mutant: {': '.join(row['red'])}")
        found[patient.name] = set(row["reached"])
    return found
