"""The C++ kernels are built once, kept, and missed politely."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trueline import native
from trueline.verify.ops import randn


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing built, nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    functions = (native.library, native.unavailable, native.panel)
    for function in functions:
        function.cache_clear()
    yield tmp_path / "trueline" / "native"
    for function in functions:
        function.cache_clear()


def test_built_once_and_kept(fresh: Path) -> None:
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    (built,) = fresh.iterdir()  # no leftovers beside it
    before = built.stat().st_mtime_ns
    native.library.cache_clear()
    native.library()
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("program", "part"), [("no-such-compiler", "no C++ compiler"), ("false", "false failed")]
)
def test_without_a_compiler_it_says_so(
    fresh: Path, program: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", program)
    assert part in (native.unavailable() or "")
    assert native.refusals(torch.float32, False) == [native.unavailable()]


def test_a_cache_that_cannot_be_written_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert native.unavailable()


def test_other_dtypes_are_refused() -> None:
    assert native.refusals(torch.bfloat16, False) == ["float32 only"]


@pytest.mark.parametrize("rows", [1, 7, 200])
def test_threads_do_not_change_bits(rows: int) -> None:
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    from trueline.ops.linear import native as linear

    packed, x = linear.pack(randn(301, 97)), randn(rows, 97, seed=1)
    threads = torch.get_num_threads()
    try:
        outcomes = []
        for count in (1, 2):
            torch.set_num_threads(count)
            outcomes.append(linear.run(x, packed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outcomes)
