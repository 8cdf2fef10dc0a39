"""No request makes the engine compile a kernel: warm-up has asked for every one before. On no GPU,
so nothing is compiled; Triton's own keys say what would be (late_kernels.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from bench_configs import write_config
from paths import CONFIGS, HELPERS
from trueline.config import EngineConfig
from trueline.engine import warmup
from trueline.engine.kernel_list import KernelList
from trueline.engine.late_kernels import LateKernels
from trueline.engine.loading import load_engine
from trueline.ops.launch import KNOWN_MULTIPLE, copied
from trueline.plan.select import Selection

# v2lite's kernels are among those of the others, at other sizes.
# A length just above a multiple of what a kernel takes at a time.
MODELS = [
    *(
        pytest.param(name, (), marks=pytest.mark.slow)
        for name in ("v2lite", "v2lite-fp8", "ling25s", "v32s", "k25s", "v4s")
    ),
    # a step of several prompts has more tokens than a sequence may
    pytest.param("v4s", ("--most", "1216"), marks=pytest.mark.slow),
    pytest.param("k25s", ("--most", "1216"), marks=pytest.mark.slow),
    ("v32s-fp8", ("--most", "32960")),
]


def late(model: Path, *options: str) -> tuple[int, list[str]]:
    """How many kernels warm-up asks for, and what requests ask for beside them."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HELPERS / "late_kernels.py"), str(model), *options]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["changed_by_listing"] == []  # what the next start reads is what this one compiled
    return found["ready"], found["late"]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_no_kernel_is_compiled_after_ready(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    ready, found = late(write_config(tmp_path / name, name, {}), *options)
    assert ready > 50
    assert found == []


@pytest.mark.slow
def test_the_check_sees_kernels_that_warm_up_has_not_asked_for() -> None:
    _, found = late(CONFIGS / "v2lite", "--cold")
    names = {re.split(r"\W", kernel)[0] for kernel in found}
    assert names >= {"settle", "grouped", "choose", "attend", "gather"}


def test_a_late_kernel_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    late = LateKernels()
    late.watch()
    assert knobs.runtime.jit_post_compile_hook is not None
    told = {"fn": None, "compile": {}, "is_manual_warmup": False, "already_compiled": False}
    knobs.runtime.jit_post_compile_hook(key="", repr="settle[num_warps=1](chunks: i32)", **told)
    assert late.count == 1
    assert "settle[num_warps=1](chunks: i32)" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '[{"module": "os", "name": "path"}]'])
def test_a_list_that_is_not_one_is_not_used(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Warm-up finds the kernels itself then."""
    file = tmp_path / "list.json"
    file.write_text(text)
    assert not KernelList(file).ask()
    assert str(file) in caplog.text or text in ("[]", "{}")  # none listed


def test_a_list_that_cannot_be_written_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    KernelList(tmp_path / "file" / "list.json").write()
    assert "not written" in caplog.text


def test_a_list_is_of_one_model_plan_and_gpu(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same for the same, in another load."""
    gpu = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: gpu)

    def file(model: Path, ops: dict[str, str] | None = None, **options: Any) -> Path:
        loaded = load_engine(model, EngineConfig(max_model_len=64, ops=ops or {}, **options))
        listed = KernelList.of(loaded.spec, loaded.plan, loaded.core.executor.runner.decoder)
        assert listed is not None
        return listed.file

    model = tiny("deepseek_v3")
    usual = file(model, block_size=16)
    assert file(model, block_size=16) == usual
    others = [
        file(tiny("deepseek_v3", keys={"num_hidden_layers": 2}), block_size=16),
        file(model, block_size=8),
        file(model, block_size=16, max_num_seqs=7),
        file(model, {"linear": "torch_mm"}, block_size=16),
    ]
    gpu.name = "NVIDIA H100"
    others.append(file(model, block_size=16))
    assert len({usual, *others}) == len(others) + 1


def test_no_list_where_another_package_takes_part(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is not in the digest, so the list would outlive it."""
    loaded = load_engine(tiny("deepseek_v3"), EngineConfig(max_model_len=64))
    theirs = Selection("theirs", "asked for")
    for plan in (
        replace(loaded.plan, selections=loaded.plan.selections | {"linear": theirs}),
        replace(loaded.plan, layers=loaded.plan.layers | {"mla": theirs}),
        replace(loaded.plan, by_format={"block fp8": {"linear": theirs}}),
    ):
        assert KernelList.of(loaded.spec, plan, loaded.core.executor.runner.decoder) is None


@pytest.mark.parametrize("most", [1, 2, 3, 6, 64, 100, 1000])
def test_numbers_along_an_axis(most: int) -> None:
    """From 1 to the largest there is; at and just above each power of two."""
    few, many = warmup.powers(most), warmup.points(most)
    assert (few[0], few[-1], many[0], many[-1]) == (1, most, 1, most)
    assert few == sorted(set(few))
    assert set(few) | {n + 1 for n in few if n < most} <= set(many)
    assert all(high <= 2 * low for low, high in pairwise(few))


def test_kernels_between_two_numbers_are_found() -> None:
    """Where both ends differ, the middle is asked as well."""
    asked: list[int] = []

    def kernels(n: int) -> Any:
        asked.append(n)
        return {"few"} if n < 8 else {"some"} if n < 24 else {"many"}

    warmup._along([1, 32], kernels)
    assert any(8 <= n < 24 for n in asked)


@pytest.mark.parametrize("longest", [40, 1000, 40_000])
def test_steps_that_are_warmed_up(longest: int) -> None:
    """The largest of every sort, and none that no request could make."""
    steps: list[Any] = []
    limits = SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=6)
    plan = SimpleNamespace(max_model_len=longest, limits=limits)
    dry: Any = SimpleNamespace(plan=plan, forward=steps.append, sample=lambda *_, **__: None)
    for numbers, step in warmup._axes(dry):
        for number in numbers:
            step(number)
    tokens = min(512, longest)
    assert [(0, tokens)] in steps
    assert [(longest - 1, 1)] * 6 in steps
    assert [(longest - tokens, tokens)] in steps
    assert [(0, tokens)] * min(6, 512 // tokens) in steps  # more than a sequence may have
    for rows in steps:
        assert sum(count for _, count in rows) <= 512
        assert all(0 <= start < start + count <= longest for start, count in rows)


def test_what_is_copied_begins_where_kernels_are_compiled_for() -> None:
    """A step's numbers decide how long each is, and must not decide which kernel it takes."""
    columns = [[1], [2, 3, 4, 5, 6], [], [7], [8, 9]]
    sent = copied(columns, torch.device("cpu"))
    assert [each.tolist() for each in sent] == columns
    assert {each.data_ptr() % KNOWN_MULTIPLE for each in sent} == {0}


class Launched:
    """As Triton's compiled kernel: it has a launcher once it has been asked for with a grid."""

    def __init__(self, name: str) -> None:
        self.src, self.metadata, self.thread = name, f"{name}'s", 0

    def __getitem__(self, grid: tuple[int, ...]) -> None:
        self.thread = threading.get_ident()


def test_launchers_are_built_in_threads_and_loaded_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded in threads, one kernel may get another's launcher: wrong arguments on a GPU."""
    built: dict[object, int] = {}

    def launcher(src: str, metadata: str) -> None:
        built[src, metadata] = threading.get_ident()

    active = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(warmup, "driver", active)
    kernels = [Launched(name) for name in "abcd"]
    with ThreadPoolExecutor(2) as pool:
        warmup.load(kernels, pool)
    here = threading.get_ident()
    assert [each.thread for each in kernels] == [here] * 4
    assert set(built) == {(name, f"{name}'s") for name in "abcd"}
    assert here not in built.values()
