"""`trueline bench memory`, on a model that is small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trueline.bench import formats, memory
from trueline.bench.footprint import tensor_bytes
from trueline.cli import main
from trueline.device import resident_bytes
from trueline.errors import UsageError

Tiny = Callable[..., Path]
needs_proc = pytest.mark.skipif(resident_bytes() is None, reason="needs /proc")


def bench(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "memory", *map(str, arguments)])
    return int(caught.value.code or 0)


@needs_proc
@pytest.mark.parametrize("process", [pytest.param("own", marks=pytest.mark.slow), "this"])
@pytest.mark.parametrize("name", ["block-fp8", "int4"])
def test_files_are_written_loaded_and_deleted(
    name: str,
    process: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {"hidden_size": 256, "moe_intermediate_size": 128}
    model = str(tiny("deepseek_v3", keys=keys, dtype="bfloat16"))
    monkeypatch.setitem(formats.PUBLISHED, model, name)
    monkeypatch.setattr(memory, "SHARD_BYTES", 500_000)
    if process == "this":  # which may have been larger before
        monkeypatch.setattr(
            memory, "_load", lambda at: memory.load(str(at)) | {"peak_bytes": 12_000_000}
        )
    assert bench("--model", model, "--layers", 3, "--directory", tmp_path, "--json") == 0
    assert list(tmp_path.iterdir()) == []
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["layers"], found["device"], found["met"]) == (3, "cpu", True)
    assert 0 < found["largest_file"] < found["checkpoint_bytes"]
    assert 0 < found["peak_bytes"] < found["limit"]
    assert found["limit"] == found["loaded_bytes"] + found["largest_file"] + (1 << 30)


FIGURES = memory.LoadFigures(
    model="v32s",
    format="block-fp8",
    layers=2,
    device="cpu",
    checkpoint_bytes=7 << 30,
    largest_file=2 << 30,
    loaded_bytes=7 << 30,
    peak_bytes=10 << 30,
    seconds=1.0,
)


def test_too_much_is_not_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FIGURES.met
    assert not replace(FIGURES, peak_bytes=FIGURES.peak_bytes + 1).met
    assert not replace(FIGURES, device="cuda").met
    worse = replace(FIGURES, peak_bytes=11 << 30)
    monkeypatch.setattr(memory, "measure_load", lambda *_: worse)
    assert bench("--model", "v32s") == 1
    assert "11.81" in capsys.readouterr().out


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 20"):
        memory.check_disk(tmp_path, int(21e9))
    assert bench("--model", "v3") == 2
    assert bench("--layers", "0") == 2


def test_memory_that_several_tensors_share_counts_once() -> None:
    whole = torch.zeros(100)
    assert tensor_bytes({"a": [whole, whole[:10]], "b": (whole.view(10, 10), torch.ones(3))}) == 412
