"""The list: a TOML file per area, a table per mutant. tests/verify/test_mutants.py
sees where it no longer fits."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "trueline"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    area: str
    id: str
    file: str
    """Below src/trueline."""
    old: str
    """Stands there exactly once."""
    new: str
    tests: tuple[str, ...]
    """pytest's arguments, below tests: at least one of them must go red."""
    meets: str
    """What a user would meet."""
    hangs: bool = False
    """Only where the mistake is one that never ends: out of time is then a kill."""

    @property
    def path(self) -> Path:
        return SOURCE / self.file

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def mutated(self) -> str:
        return self.path.read_text().replace(self.old, self.new)


def load() -> list[Mutant]:
    return [
        Mutant(area=file.stem, **(row | {"tests": tuple(row["tests"])}))
        for file in sorted(HERE.glob("*.toml"))
        for row in tomllib.loads(file.read_text())["mutant"]
    ]
