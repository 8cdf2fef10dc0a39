"""The cells of kernels on stored weights, small and on a CPU: what is measured is the op's work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trueline.bench.gpu.kernels import format_work, formats
from trueline.bench.gpu.kernels.timing import Calls
from trueline.bench.gpu.roofline import READ
from trueline.bench.gpu.steps import KernelTime
from trueline.tiny.quantise import published_storage
from trueline.utils.json_types import JSON

Tiny = Callable[..., Path]
US = 10.0
KERNELS = [KernelTime("sort", 3.0, 3.0), KernelTime("grouped", 8.0, 2.0)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(calls: Calls) -> float:
        for call in calls:
            call()
        return US

    monkeypatch.setattr(format_work, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(formats, "graph_time", once)
    monkeypatch.setattr(formats, "kernel_times", lambda run: KERNELS)
    monkeypatch.setattr(format_work, "ALTERNATING", 1)
    monkeypatch.setattr(format_work, "CALLS", 2)
    monkeypatch.setattr(format_work, "ROWS", (1, 5))


@pytest.fixture
def model(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A tiny model in a format, under the name of its directory."""

    def make(name: str) -> str:
        keys = {"hidden_size": 64, "moe_intermediate_size": 32}
        path = str(tiny("deepseek_v3", keys=keys, storage=published_storage(name)))
        monkeypatch.setitem(format_work.PUBLISHED, path, name)
        return path

    return make


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("name", "bytes_each"), [("block-fp8", 1.0), ("int4", 0.5 + 2 / 32)])
def test_experts(name: str, bytes_each: float, model: Callable[[str], str]) -> None:
    """12 experts of 3 × 64 × 32 numbers, three for each of 7 tokens."""
    (work,) = format_work.experts(model(name), (7,))
    row = formats.measure(work)
    assert row["shape"] == [12, 32, 64]
    assert "error" not in row
    read = 7 * 3 / row["rows_per_expert"]
    assert 3 <= read <= 12
    scales = 3 * 4 if name == "block-fp8" else 0  # one block of each of an expert's matrices
    assert row["bytes"] == pytest.approx(read * (3 * 64 * 32 * bytes_each + scales))
    assert row["of_roofline"] == pytest.approx(row["bytes"] / READ / (US / 1e6))
    assert row["tflops"] == pytest.approx(2 * 3 * 64 * 32 * 7 * 3 / US / 1e6)
    assert set(row["us"]) == {"stored", "bfloat16"}


@pytest.mark.usefixtures("on_cpu")
def test_a_prefill_step_has_a_target(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_work, "MANY", 8)
    (work,) = format_work.experts(model("block-fp8"), (8,))
    row = formats.measure(work)
    assert set(row["us"]) == {"stored", "bfloat16", "cublas"}
    assert row["gemm_tflops"] == pytest.approx(row["flops"] / 8e6)
    assert row["target"] == {"gemm_tflops": 900}
    assert row["met"] is False
    assert [each["name"] for each in row["kernels"]] == ["sort", "grouped"]


@pytest.mark.usefixtures("on_cpu")
def test_gemms_and_mlps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(format_work.GEMMS, "small", (200, 130))
    monkeypatch.setattr(format_work, "MLP", (48, 64))
    rows = [formats.measure(work) for work in (*format_work.gemms("small"), *format_work.mlps())]
    assert [(row["op"], row["rows"]) for row in rows] == [
        *(("linear", 1), ("linear", 5)),
        *(("mlp", 1), ("mlp", 5)),
    ]
    assert rows[0]["bytes"] == 200 * 130 + 4 * 4
    assert not [row for row in rows if "error" in row]


@pytest.mark.usefixtures("on_cpu")
def test_wrong_numbers_are_an_error(
    model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work,) = format_work.experts(model("int4"), (4,))
    exact = work.exact
    monkeypatch.setattr(work, "exact", lambda: (1.02 * exact()[0], exact()[1]))
    row: JSON = formats.measure(work)
    assert "off by 0.02" in row["error"]
