"""`trueline bench gpu` for stored formats: a tiny model measured on a CPU, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paths import RESULTS
from trueline.bench.gpu import end_to_end
from trueline.cli import bench_gpu, main
from trueline.errors import UsageError
from trueline.utils.json_types import JSON

Tiny = Callable[..., Path]
MODEL = "k25s"
KERNEL: JSON = {
    "op": "experts",
    "of": "k25s",
    "shape": [384, 1024, 7168],
    "rows": 16,
    "rows_per_expert": 1.2,
    "format": "int4",
    "implementations": {"stored": "some_kernel", "bfloat16": "triton"},
    "us": {"stored": 100.0, "bfloat16": 300.0},
    "bytes": 3.3e8,
    "flops": 1e9,
    "of_roofline": 0.76,
    "tflops": 10.0,
    "target": {"of_roofline": 0.75},
    "met": True,
    "off": 2e-3,
}


@pytest.fixture
def measured(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> dict[str, JSON]:
    """By format. The second decode cell is one of the device alone, which a CPU has not."""
    decode = [{"B": 2, "inp": 8, "out": 4}, {"B": 1, "inp": 20}]
    monkeypatch.setattr(end_to_end, "FORMAT_DECODE", decode)
    monkeypatch.setattr(end_to_end, "FORMAT_PREFILL", [{"B": 2, "inp": 12}])
    keys = {"hidden_size": 64, "moe_intermediate_size": 32}
    model = tiny("deepseek_v3", keys=keys, dtype="bfloat16")
    found = {}
    for form in ("bfloat16", "int4"):
        result = end_to_end.run_format(str(model), form, 0.0)
        found[form] = json.loads(json.dumps(result).replace(str(model), MODEL))
    return found


def test_some_of_the_cells(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order asked for, and no longer ones."""
    decode = [{"B": batch, "inp": 8, "out": 2} for batch in (1, 2, 3)]
    monkeypatch.setattr(end_to_end, "FORMAT_DECODE", [*decode, {"B": 2, "inp": 10**6}])
    model = str(tiny("deepseek_v3", dtype="bfloat16"))
    found = end_to_end.main(model, "bfloat16", "0", "3,1")
    assert [cell["B"] for cell in found["decode"]] == [3, 1]
    assert all(cell["ms_step"] > 0 for cell in found["decode"])
    assert found["prefill"] == []
    with pytest.raises(UsageError, match="5 requests: there are cells of 1, 2, 3"):
        end_to_end.main(model, "bfloat16", "0", "3,5")


def recorded(tmp_path: Path, **parts: list[JSON]) -> Path:
    (tmp_path / "figures.json").write_text(json.dumps(parts))
    return tmp_path / "figures.json"


def bench(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "gpu", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_a_model_in_a_format_beside_bfloat16(
    measured: dict[str, JSON], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = [measured[form]["memory"]["checkpoint_bytes"] for form in ("int4", "bfloat16")]
    assert memory[0] < memory[1]
    assert measured["int4"]["memory"]["loaded_bytes"] > memory[0]
    file = recorded(tmp_path, formats=list(measured.values()), format_kernels=[KERNEL])
    out, plot = tmp_path / "out.json", tmp_path / "formats.svg"
    assert bench("--recorded", file, "--out", out, "--plot", plot) == 0
    told = capsys.readouterr().out
    served, on_device = json.loads(out.read_text())["format_decode"]
    assert served["speedup"] == pytest.approx(served["bf16_ms_step"] / served["ms_step"])
    assert served["of_roofline"] == pytest.approx(served["roofline_ms"] / served["ms_step"])
    assert served["roofline_ms"] < served["bf16_roofline_ms"]
    assert "speedup" not in on_device
    assert f"{served['ms_step']:.2f}" in told
    assert "some_kernel" in told
    assert "76%" in told
    assert plot.read_text().lstrip().startswith("<?xml")


def test_both_panels(measured: dict[str, JSON], tmp_path: Path) -> None:
    before = json.loads((RESULTS / "gpu-h200.json").read_text())
    file = recorded(tmp_path, **before | {"formats": list(measured.values())})
    assert bench("--recorded", file, "--plot", tmp_path / "both.svg") == 0
    drawn = (tmp_path / "both.svg").read_text()
    assert "recorded" in drawn
    assert "same run" in drawn


@pytest.mark.parametrize("broken", ["cell", "kernel", "beside"])
def test_what_failed_is_told(
    broken: str, measured: dict[str, JSON], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = dict(KERNEL)
    formats = list(measured.values())
    if broken == "cell":
        formats[1]["decode"][0] = {"model": MODEL, "B": 2, "inp": 8, "error": "no room"}
    elif broken == "kernel":
        kernel["error"] = "no room"
    else:
        formats = formats[1:]  # bfloat16 did not fit: told by its exit, when it was measured
    file = recorded(tmp_path, formats=formats, format_kernels=[kernel])
    assert bench("--recorded", file) == int(broken != "beside")
    assert ("no room" in capsys.readouterr().out) == (broken != "beside")


@pytest.mark.parametrize("part", ["models", "formats", "kernels", "format-kernels"])
def test_parts_are_measured_alone(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one whose process fails makes the exit code."""
    asked: list[tuple[str, ...]] = []

    def fails(*what: str) -> None:
        asked.append(what)

    monkeypatch.setattr(bench_gpu, "_measure", fails)
    monkeypatch.setattr(bench_gpu, "_kernels", lambda *what: [fails(*what)])
    assert bench("--only", part, "--model", "v32s", "--model", "k25s") == 1
    assert (
        asked
        == {
            "models": [("v32s",)],
            "formats": [
                *(("v32s", "bfloat16"), ("v32s", "block-fp8-ue8m0")),
                *(("k25s", "bfloat16"), ("k25s", "int4")),
            ],
            "kernels": [(name, "--engine") for name in ("attention", "lightning", "experts")],
            "format-kernels": [("formats",)],
        }[part]
    )
