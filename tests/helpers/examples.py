"""The packages of examples/, installed by pip into a directory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trueline
from paths import ROOT


def install(example: str, target: Path) -> Path:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    source = str(ROOT / "examples" / example)
    command = [sys.executable, "-m", "pip", "install", *options, str(target), source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def call(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """python -m …, with the packages of `directory` installed."""
    paths = (str(directory), str(Path(trueline.__file__).parent.parent))
    # half of a start is what pytest's other plugins import
    fast = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=os.environ | fast | {"PYTHONPATH": os.pathsep.join(paths)},
    )
