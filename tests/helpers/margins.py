"""A pytest plugin (-p margins) that writes down every comparison's error as a part of what is
accepted: one JSON file for each process in the directory TEST_MARGINS."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from trueline.ops.registry import OPS
from trueline.verify import bounds

Margins = dict[str, list[float]]
"""By check: the largest part of what is accepted, up to 1; and the smallest above 1, a fault's."""
MARGINS: Margins = {}


def label(what: str) -> str:
    """The op, the kind of comparison, or the file of other tests."""
    name = what.rpartition("op = reference: ")[2].split(",")[0].split(":")[0]
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return name if name in OPS or " = " in name else Path(test).name


def note(margins: Margins, name: str, ratio: float) -> None:
    kept = margins.setdefault(name, [0.0, math.inf])
    if ratio <= 1:
        kept[0] = max(kept[0], ratio)
    elif math.isfinite(ratio):
        kept[1] = min(kept[1], ratio)


def pytest_configure() -> None:
    bounds.record = lambda what, ratio: note(MARGINS, label(what), ratio)


def pytest_unconfigure() -> None:
    directory = Path(os.environ["TEST_MARGINS"])
    (directory / f"{os.getpid()}.json").write_text(json.dumps(MARGINS))


def collected(directory: Path) -> Margins:
    """Of all processes of a run."""
    margins: Margins = {}
    for file in directory.glob("*.json"):
        for name, ratios in json.loads(file.read_text()).items():
            for ratio in ratios:
                note(margins, name, ratio)
    return margins
