"""tools/structure.py counts what it says, on sources made for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paths import ROOT

SOURCE = {
    "src/trueline/layers/norm.py": (
        "from rich.table import Table\n"
        "from trueline.spec.row import Row\n"
        "def probe(op, news):\n"
        "    Table(1, 2, 3, 4, 5, 6)\n"
        "    return hasattr(op, 'run') and Row(1, 2, 3, 4, 5, news)\n"
    ),
    "src/trueline/spec/row.py": (
        "from typing import Any\nclass Row: ...\nx: Any = Row(1, 2, 3, 4, 5)\n"
    ),
    "src/trueline/ops/pieces.py": "def long():\n" + "    x = 1\n" * 60,
    "src/trueline/engine/row.py": "class Row: ...\n",
}


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_what_is_read_off_the_source(structure: ModuleType, tmp_path: Path) -> None:
    for name, text in SOURCE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    column = structure.Column()
    structure.count_source(tmp_path, column)
    assert column.details == {
        "functions over 60 lines": ["ops/pieces.py:1 long (61)"],
        "constructors with over 5 positional arguments": ["layers/norm.py:5 Row (6)"],
        "`hasattr` in layers and ops": ["layers/norm.py:5"],
        "private words: identifiers": ["news 2"],
        "private words: files and folders": ["src/trueline/ops/pieces"],
        "class names with several meanings": ["Row 2"],
    }
    lines = sum(len(text.splitlines()) for text in SOURCE.values())
    assert column.rows["`Any` per 1,000 lines"] == f"{2000 / lines:.1f}"
    assert structure.table({"here": column}).startswith("| | here |\n|---|---|\n")
