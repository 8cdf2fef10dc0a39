"""A plug-in of one file, for servers that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import trueline


def plug_in(at: Path, name: str, entry: str, source: str) -> str:
    """Installs it at a directory; returns the PYTHONPATH with which a process finds it. `entry`:
    KIND.NAME of an op."""
    info = at / f"{name}-1.0.dist-info"
    info.mkdir()
    (at / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[trueline.ops]\n{entry} = {name}\n")
    return os.pathsep.join((str(at), str(Path(trueline.__file__).parent.parent)))
