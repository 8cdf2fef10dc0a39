from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trueline import native


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing built, nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))  # nothing is computed with it
    monkeypatch.setattr(native, "_tell", native._on_stderr)  # a server's tests may have changed it
    functions = (native.library, native.unavailable, native.panel)
    for function in functions:
        function.cache_clear()
    yield tmp_path / "trueline" / "native"
    for function in functions:
        function.cache_clear()
