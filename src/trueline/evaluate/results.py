"""A results directory: samples.jsonl as they come, results.json; resumed where a run stopped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path

from trueline import __version__
from trueline.errors import TruelineError, UsageError, short_repr
from trueline.evaluate.run import Evaluation
from trueline.evaluate.samples import FILE as SAMPLES
from trueline.evaluate.samples import Sample, encode, latest, read_samples
from trueline.utils.json_types import JSON

RESULTS = "results.json"


class NotWritten(TruelineError):
    """A full disk, say. Samples that were written stay, and a later run goes on from there."""

    exit_code = 1


class ResultsDirectory:
    """One run at a time. `settings` are what decides the outputs: a directory has one of them."""

    def __init__(self, directory: Path, settings: JSON, samples: FileIO) -> None:
        self.directory = directory
        self.settings = settings
        self._samples = samples
        self.known: dict[tuple[str, int], Sample] = {}
        """Of an earlier run, but for those that ended in error."""
        self.notes: list[str] = []

    @classmethod
    @contextmanager
    def open(cls, directory: Path, settings: JSON) -> Iterator[ResultsDirectory]:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(directory, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"--out {directory}: not writable ({error})") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"--out {directory}: another evaluation writes there") from None
            _check_settings(directory, settings)
            # first: samples without settings could not be resumed
            if not (directory / RESULTS).exists():
                content = _as_json({"settings": settings, "versions": versions()})
                _write(directory / RESULTS, content)
            with _open_samples(directory) as samples:
                opened = cls(directory, settings, samples)
                opened._resume()
                yield opened
        finally:
            os.close(lock)

    def _resume(self) -> None:
        found, whole = read_samples(self.directory / SAMPLES)
        size = self._samples.seek(0, os.SEEK_END)
        if whole < size:
            self._samples.truncate(whole)
            self.notes.append(f"{SAMPLES}: its last line is torn ({size - whole} bytes): dropped")
        self.known = {key: one for key, one in latest(found).items() if one.error is None}
        if found:
            again = len(latest(found)) - len(self.known)
            more = f", {again} ended in error and are tried again" if again else ""
            self.notes.append(f"{self.directory}: {len(self.known)} samples are there{more}")

    def append(self, sample: Sample) -> None:
        rest = encode(sample)
        try:
            while rest:
                rest = rest[self._samples.write(rest) :]
        except OSError as error:
            raise _not_written(self.directory / SAMPLES, error) from error

    def finish(self, evaluation: Evaluation) -> JSON:
        """Samples in the order of the items, and the figures."""
        _write(self.directory / SAMPLES, b"".join(map(encode, evaluation.samples)))
        results = results_of(evaluation, self.settings)
        if all(sample.key in self.known for sample in evaluation.samples):
            # nothing ran: speed and plan are those of the run before
            before = read_results(self.directory)
            results |= {name: before[name] for name in ("speed", "plan") if name in before}
        _write(self.directory / RESULTS, _as_json(results))
        return results


def _open_samples(directory: Path) -> FileIO:
    """Unbuffered: what a full disk refused must not be written again by close()."""
    try:
        return (directory / SAMPLES).open("ab", buffering=0)
    except OSError as error:
        raise UsageError(f"--out {directory}: not writable ({error})") from error


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all."""
    scratch = file.with_name(f"{file.name}.new")
    try:
        scratch.write_bytes(content)
        scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise _not_written(file, error) from error


def _not_written(file: Path, error: OSError) -> NotWritten:
    return NotWritten(
        f"{file}: not written ({error}); what is there stays: the same command goes on from it"
    )


def results_of(evaluation: Evaluation, settings: JSON) -> JSON:
    seconds, tokens = evaluation.seconds, evaluation.generated_tokens
    return {
        "settings": settings,
        "versions": versions(),
        "figures": evaluation.figures(),
        "speed": {
            "seconds": seconds,
            "generated_tokens": tokens,
            "tokens_per_s": tokens / seconds if tokens else None,
        },
        "plan": evaluation.plan,
    }


def versions() -> dict[str, str]:
    found = {"trueline": __version__}
    for name in ("torch", "tokenizers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read_results(directory: Path) -> JSON:
    file = directory / RESULTS
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not readable ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise UsageError(f"{file}: no results of an evaluation")
    return found


def _check_settings(directory: Path, settings: JSON) -> None:
    if not (directory / RESULTS).exists():
        if (directory / SAMPLES).exists():
            raise UsageError(
                f"--out {directory}: it has a {SAMPLES} without its {RESULTS}; accepted: a "
                "directory of an evaluation, or a new one"
            )
        return
    # as JSON has it: tuples are lists there
    now = json.loads(_as_json(settings))
    found = list(differences(read_results(directory)["settings"], now))
    if found:
        raise UsageError(
            f"--out {directory}: it has results with other settings: {'; '.join(found)}; "
            "accepted: the same settings, or another directory"
        )


def differences(there: JSON, now: JSON, prefix: str = "") -> Iterable[str]:
    """Each as `name: value there, value now`."""
    for name in [*there, *(name for name in now if name not in there)]:
        old, new = there.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {short_repr(old)} there, {short_repr(new)} now"


def _as_json(content: JSON) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
