"""No request makes the engine compile a kernel: warm-up has asked for every one before. On no GPU,
so nothing is compiled; Triton's own keys say what would be (late_kernels.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from triton import knobs

from trueline.engine.kernel_list import KernelList
from trueline.engine.late_kernels import LateKernels

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "bench" / "configs"
# v2lite's kernels are among those of the others, at other sizes.
MODELS = [pytest.param("v2lite", marks=pytest.mark.slow), "ling25s", "v32s"]


def late(name: str, *options: str) -> tuple[int, list[str]]:
    """How many kernels warm-up asks for, and what requests ask for beside them."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "late_kernels.py"), str(CONFIGS / name), *options]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["changed_by_listing"] == []  # what the next start reads is what this one compiled
    return found["ready"], found["late"]


@pytest.mark.parametrize("name", MODELS)
def test_no_kernel_is_compiled_after_ready(name: str) -> None:
    ready, found = late(name)
    assert ready > 50
    assert found == []


def test_the_check_sees_kernels_that_warm_up_has_not_asked_for() -> None:
    _, found = late("v2lite", "--cold")
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
