"""Where things are in the repository."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
CONFIGS = ROOT / "src" / "trueline" / "bench" / "configs"
RESULTS = DOCS / "results"
