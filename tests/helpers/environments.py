"""Python environments that tests make beside the project's own: named, pinned, kept."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from trueline.utils.environment import cache_directory

SECONDS = 900.0


def python_with(
    name: str, requirements: Sequence[str], *options: str, made_from: Iterable[Path] = ()
) -> Path:
    """The interpreter of an environment with these packages. It is made once for a list of them,
    and for the contents of files that the list names; without an index the test is skipped."""
    key = hashlib.sha256(repr((sys.version, requirements, options)).encode())
    for file in made_from:
        key.update(file.read_bytes())
    folder = cache_directory() / "test-environments" / f"{name}-{key.hexdigest()[:12]}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install(python, *options, *requirements)
            (folder / "complete").touch()
    return python


def install(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if "NewConnectionError" in done.stderr or "No matching distribution" in done.stderr:
        pytest.skip(f"no package index at hand: pip install {' '.join(arguments)}")
    assert done.returncode == 0, done.stderr
