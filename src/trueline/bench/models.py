"""What benchmarks are run on: directories, hub ids, or one of our configs by its name."""

from __future__ import annotations

from pathlib import Path

from trueline.utils.hub import find_config

CONFIGS = Path(__file__).parent / "configs"


def find_bench_model(model: str | Path) -> tuple[Path, bool]:
    """The directory, and whether weights are in it (else they are drawn)."""
    own = CONFIGS / str(model)
    if str(model) in names() and not Path(model).exists():
        return own, False
    return find_config(model)


def names() -> list[str]:
    return sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
