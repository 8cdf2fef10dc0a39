"""The C++ kernels are built once, kept, and missed politely."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from implementations import with_threads
from trueline import native
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore
from trueline.errors import UsageError
from trueline.ops.capabilities import NATIVE, Context
from trueline.ops.registry import implementation
from trueline.ops.sink_attention import SinkRows, SinkRun
from trueline.ops.sparse_rows import Run
from trueline.utils.environment import calm_openmp
from trueline.verify.ops import hyper_connections as streams
from trueline.verify.ops import randn, sink


def test_built_once_and_kept(fresh: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And told on stderr while it happens, not when nothing is compiled."""
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("compiling C++ kernels")
    assert last.startswith("compiled C++ kernels in")
    (built,) = fresh.iterdir()  # no leftovers beside it
    before = built.stat().st_mtime_ns
    native.library.cache_clear()
    native.library()
    assert built.stat().st_mtime_ns == before
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "part"), [("no-such-compiler", "no C++ compiler"), ("false", "false failed")]
)
def test_without_a_compiler_it_says_so(
    fresh: Path, program: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", "native")  # also where kernels are off
    monkeypatch.setenv("CXX", program)
    assert part in (native.unavailable() or "")
    assert NATIVE.refusals(Context(dtype=torch.float32)) == [native.unavailable()]


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
    assert NATIVE.refusals(Context(dtype=torch.bfloat16)) == ["float32 only"]


@pytest.fixture(name="attention")
def sink_attention() -> Any:
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    return implementation("sink_attention", "native")


def test_threads_do_not_change_bits_of_attention_with_sinks(attention: Any) -> None:
    step = sink.sink_step(sink.Shape(70, 4, 64, 16, 90), [(0, 90), (700, 3), (3, 1)])
    q, sinks = randn(step.num_tokens, 13, 47, seed=3), sink.head_sinks(13)
    first, *others = with_threads(lambda: step.run(attention, q, sinks, sink.FULL))
    assert all(torch.equal(first, other) for other in others)


def test_threads_do_not_change_bits_of_streams(attention: Any) -> None:
    op = implementation("hyper_connections", "native")
    for case in streams.cases(torch.float32, [(4, 129, 41, 1e-6, 1e-6, 20)]):
        y = randn(41, 129, seed=4)

        def outputs(case: streams.Case = case, y: Tensor = y) -> Tensor:
            h, mixed = case.advanced(op, y, case.mixed(op))
            parts = (h, mixed.x, mixed.post, mixed.carry, case.head(op))
            return torch.cat([part.flatten() for part in parts])

        first, *others = with_threads(outputs)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_of_16_bits_are_read_as_they_are(dtype: torch.dtype, attention: Any) -> None:
    """Every one of them, next to zero too: a key alone is what comes out."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    store = LatentStore(LatentLayout(100, 28, 16), 1, 33, dtype)
    finite = torch.where(every.isfinite(), every, 0).view(512, 128)
    view, cells = store.views[0], torch.arange(16, 528)
    view.write(cells, finite[:, :100], finite[:, 100:])
    rows = SinkRows((SinkRun(list(range(1, 33)), [], 0, 512),))
    q, alone = torch.zeros(512, 1, 128, dtype=dtype), torch.full((1,), -torch.inf)

    def read() -> Tensor:
        given = attention.prepare(rows, view, None, sink.FULL, size=1, ratio=0)
        out = attention.run(q, view, None, given, sinks=alone, softmax_scale=1.0, chosen=None)
        return cast("Tensor", out)[:, 0]

    assert torch.equal(read(), finite)
    for at, number in enumerate(every[~every.isfinite()][::97].tolist()):
        store.rows[0, 16 + at, at % 128] = number
        assert read()[at].isnan().all()


def test_nothing_beyond_a_sequence_s_blocks_is_read(attention: Any) -> None:
    """Whoever says that a token sees more than was given is told."""
    shape = sink.Shape(7, 4, 8, 3)
    step = sink.sink_step(shape, [(21, 3)])
    q, (run,) = randn(3, 5, 47), step.rows.runs
    for short in (replace(run, window=run.window[:-1]), replace(run, entries=run.entries[:-1])):
        with pytest.raises(ValueError, match="a token sees"):
            sink.attend(attention, step, SinkRows((short,)), q, sink.head_sinks(5), sink.FULL, None)


def test_tables_of_a_window_are_as_long_as_the_window() -> None:
    """Not as the context: they are made anew for every step."""
    held = [0] * 16_381 + [5, 9, 6, 3]
    rows = SinkRows((SinkRun(held, [], 65_533, 3), SinkRun([4, 8, 2], [], 2, 9)))
    assert rows.near(7, 4).runs == (Run([5, 9, 6], 10, 3), Run([4, 8, 2], 3, 9))


@pytest.mark.parametrize("rows", [1, 7, 200])
def test_threads_do_not_change_bits(rows: int) -> None:
    """Sizes that are cut into many runs: rows, panels, experts and heads."""
    if native.unavailable():
        pytest.skip(f"not built here: {native.unavailable()}")
    D, W, E, H = 300, 301, 5, 13
    several, linear = implementation("experts", "native"), implementation("linear", "native")
    mlp, per_head = implementation("mlp", "native"), implementation("batched_gemm", "native")
    norm, rope = implementation("rms_norm", "native"), implementation("rope", "native")
    weight, x = linear.pack(randn(W, D)), randn(rows, D, seed=1)
    gate_up, down = randn(E, 2 * W, D, seed=2), randn(E, D, W, seed=3)
    dense, experts = mlp.pack(gate_up[0], down[0], None), several.pack(gate_up, down, None)
    ids, scales = torch.randint(E, (rows, 2)), randn(rows, 2, seed=4)
    heads, by_head = per_head.pack(randn(H, 67, D, seed=5), None, True), randn(rows, H, D, seed=6)
    angles = (randn(rows, D // 2, seed=7), randn(rows, D // 2, seed=8))

    def outputs() -> Tensor:
        return torch.cat([
            linear.run(x, weight).flatten(),
            mlp.run(x, dense, None).flatten(),
            mlp.middle(x, dense, None).flatten(),
            several.run(x, ids, scales, experts, None).flatten(),
            per_head.run(by_head, heads).flatten(),
            norm.run(by_head, randn(D, seed=9), 1e-6).flatten(),
            rope.run(by_head, *angles, "interleaved").flatten(),
        ])  # fmt: skip

    first, *others = with_threads(outputs)
    for other in others:
        assert torch.equal(first, other)


def test_an_engine_s_threads_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(native, "unavailable", lambda: None)
    monkeypatch.setattr(native, "library", lambda: SimpleNamespace(use_threads=asked.append))
    native.use_threads(3)
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    native.use_threads(4)
    assert asked == [3]


def test_who_asks_is_told_of_compiling(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    native.tell_builds(heard.append)
    monkeypatch.setenv("TRUELINE_NATIVE_TARGET", "native")  # also where kernels are off
    monkeypatch.setenv("CXX", "false")
    assert native.unavailable()
    assert [line.split(" (")[0] for line in heard] == ["compiling C++ kernels for this CPU"]


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_openmp_looks_for_work_as_long_as_the_user_says(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    calm_openmp()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


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
        implementation(op, "native") for op in ("linear", "experts", "batched_gemm", "mlp")
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
