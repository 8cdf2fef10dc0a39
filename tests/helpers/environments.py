"""Python environments that tests make beside the project's own: named, pinned, kept."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from trueline.utils.environment import cache_directory

SECONDS = 900.0
NO_REGISTRY = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "E404", "ETARGET")


def python_with(
    name: str, requirements: Sequence[str], *options: str, made_from: Iterable[Path] = ()
) -> Path:
    """The interpreter of an environment with these packages. It is made once for a list of them,
    and for the contents of files that the list names; without an index the test is skipped."""
    key = hashlib.sha256(repr((sys.version, requirements, options)).encode())
    for file in made_from:
        key.update(file.read_bytes())

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        install(folder / "bin" / "python", *options, *requirements)

    return _kept(name, key.hexdigest(), make) / "bin" / "python"


def node_modules(name: str, packages: Sequence[str]) -> Path:
    """The folder with these packages, NAME@VERSION, for Node; without a registry the test is
    skipped."""

    def make(folder: Path) -> None:
        folder.mkdir()
        options = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")
        command = ["npm", "install", "--prefix", str(folder), *options, *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode != 0 and any(word in done.stderr for word in NO_REGISTRY):
            pytest.skip(f"no package registry at hand: npm install {' '.join(packages)}")
        assert done.returncode == 0, done.stderr

    return _kept(name, hashlib.sha256(repr(packages).encode()).hexdigest(), make) / "node_modules"


def _kept(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """A folder that is made once for a key."""
    folder = cache_directory() / "test-environments" / f"{name}-{key[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "complete").touch()
    return folder


def install(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if "NewConnectionError" in done.stderr or "No matching distribution" in done.stderr:
        pytest.skip(f"no package index at hand: pip install {' '.join(arguments)}")
    assert done.returncode == 0, done.stderr
