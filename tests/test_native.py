"""The C++ kernels are built once, kept, and missed politely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trueline import native
from trueline.device import compiler, cpu_features
from trueline.errors import UsageError
from trueline.ops.registry import implementation
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


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
def test_what_kernels_are_compiled_for(
    fresh: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a reason; never code that this CPU does not have."""
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", target)
    missing = set(native.TARGETS[target]) - set(cpu_features().split())
    if missing and compiler():
        assert "this CPU has no" in (native.unavailable() or "")
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    assert native.panel() == (32 if target == "x86-64-v4" else 16)
    (first,) = fresh.iterdir()
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", "off")
    native.library.cache_clear()
    native.unavailable.cache_clear()
    assert native.unavailable() == "TRUELINE_NATIVE_TARGET is off"
    assert list(fresh.iterdir()) == [first]


def test_an_unknown_target_is_refused(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", "x86-64-v5")
    with pytest.raises(UsageError, match="NATIVE_TARGET = 'x86-64-v5': accepted: native, x86-64"):
        native.unavailable()


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


@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_bfloat16_weights_have_the_bits_of_the_same_in_float32(rows: int) -> None:
    """They are exact in float32, so not a bit may differ."""
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    D, W, E, H = 29, 43, 5, 3
    gate_up, down = (randn(E, 2 * W, D) / 4).bfloat16(), (randn(E, D, W, seed=1) / 4).bfloat16()
    x = randn(rows, D, seed=2)
    ids, weights = torch.randint(E, (rows, 2)), randn(rows, 2, seed=3)
    heads, by_head = randn(H, 37, 19, seed=4).bfloat16(), randn(rows, H, 19, seed=5)
    one, several, per_head, mlp = (
        implementation(op, "native") for op in ("linear", "experts", "head_product", "mlp")
    )

    def outputs(convert: Callable[[Tensor], Tensor]) -> list[Tensor]:
        a, b, c = (convert(weight) for weight in (gate_up, down, heads))
        return [
            one.run(x, one.pack(a[0])),
            mlp.run(x, mlp.pack(a[0], b[0], None), None),
            several.run(x, ids, weights, several.pack(a, b, None), None),
            per_head.run(by_head, per_head.pack(c, None, True)),
        ]

    for small, wide in zip(outputs(lambda w: w), outputs(Tensor.float), strict=True):
        assert torch.equal(small, wide)
    assert one.pack(gate_up[0]).data.dtype == torch.bfloat16
