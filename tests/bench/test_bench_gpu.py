"""`trueline bench gpu` from recorded figures: the tables, the plot, and failures that show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paths import RESULTS
from trueline.cli import main

RECORDED = RESULTS / "gpu-h200.json"


def bench(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "gpu", *map(str, arguments)])
    return int(caught.value.code or 0)


def test_the_figures_of_the_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/results/performance.md tells is in the file that it names."""
    assert bench("--recorded", RECORDED, "--plot", tmp_path / "gpu.svg") == 0
    told = capsys.readouterr().out
    page = (RESULTS / "performance.md").read_text()
    for row in json.loads(RECORDED.read_text())["decode"]:
        assert f"{row['ms_step']:.2f}" in told
        assert f"| {row['ms_step']:.2f} | {row['step_us'] / 1000:.2f} |" in page
    assert (tmp_path / "gpu.svg").read_text().lstrip().startswith("<?xml")


def test_a_cell_that_failed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(RECORDED.read_text())
    cell = figures["models"][0]["decode"][0]
    for key in ("ms_step", "tok_s"):
        del cell[key]
    cell["error"] = "RuntimeError('no room')"
    (tmp_path / "broken.json").write_text(json.dumps(figures))
    assert bench("--recorded", tmp_path / "broken.json") == 1
    assert "no room" in capsys.readouterr().out
