"""Our figures beside the recorded peers' and the roofline: rows for tables, and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trueline.bench.gpu.format_report import step_ms
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER = "vllm"
PEERS = Path(__file__).parent / "peers-h200.json"


def peers() -> JSON:
    found: JSON = json.loads(PEERS.read_text())
    return found


def _theirs(recorded: JSON, what: str, cell: JSON) -> JSON | None:
    keys = [key for key in ("model", "B", "inp") if key in cell]
    for entry in recorded["end_to_end"]:
        same = all(entry.get(key) == cell[key] for key in keys)
        if entry["engine"].startswith(PEER) and entry["what"] == what and same:
            return dict(entry)
    return None


def decode_rows(found: list[JSON], recorded: JSON) -> list[JSON]:
    """One per cell: ms per step of ours, the peer's, the roofline and the target."""
    rows = []
    for model in found:
        for cell in model["decode"]:
            theirs = _theirs(recorded, "decode", cell)
            row = dict(cell) | {"vllm_ms": theirs["ms_step"] if theirs else None}
            if "ms_step" in cell:
                row["of_roofline"] = cell["roofline_ms"] / cell["ms_step"]
                row["to_vllm"] = cell["ms_step"] / theirs["ms_step"] if theirs else None
                row["met"] = cell["ms_step"] <= cell["target_ms"]
            rows.append(row)
    return rows


def prefill_rows(found: list[JSON], recorded: JSON) -> list[JSON]:
    rows = []
    for model in found:
        for cell in model["prefill"]:
            theirs = _theirs(recorded, "prefill", cell)
            row = dict(cell) | {"vllm_tok_s": theirs["tok_s"] if theirs else None}
            if "tok_s" in cell and theirs:
                row["to_vllm"] = cell["tok_s"] / theirs["tok_s"]
                row["met"] = row["to_vllm"] >= cell["target_factor"]
            rows.append(row)
    return rows


def start_rows(found: list[JSON], recorded: JSON) -> list[JSON]:
    rows = []
    for model in found:
        theirs = _theirs(recorded, "start", {"model": model["model"]})
        rows.append({
            "model": model["model"],
            "s": model["start_s"],
            "phases": model["start_phases"],
            "vllm_s": theirs["s"] if theirs else None,
        })  # fmt: skip
    return rows


def kernel_rows(found: list[JSON]) -> list[JSON]:
    """Cells of kernels that peers were timed on: ours, vLLM's and the best of all."""
    rows = []
    for cell in found:
        peers = cell.get("peers") or {}
        if not peers or not cell.get("us"):
            continue
        us = next(iter(cell["us"].values()))
        vllm = min(t for name, t in peers.items() if name.startswith("vLLM") and "FA3" not in name)
        best = min(peers, key=lambda name: peers[name])
        rows.append({
            "cell": " ".join(cell["cell"].split()),
            "us": us,
            "vllm_us": vllm,
            "best_peer": best,
            "best_us": peers[best],
            "to_best": us / peers[best],
            "beats_vllm": us < vllm,
        })  # fmt: skip
    return rows


def plot(peers: list[JSON], formats: list[JSON], file: Path) -> None:
    """Decode cells: bars, and the roofline as a line. One panel for bfloat16 beside the peer, one
    for stored formats beside bfloat16; each if there are cells."""
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes], None]] = []
    if peers:
        panels.append(partial(_plot_peers, [row for row in peers if "ms_step" in row]))
    if formats:
        panels.append(partial(_plot_formats, [row for row in formats if step_ms(row)]))
    figure = Figure(figsize=(11, 4.4 * len(panels)), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        panel(axes)
        axes.set_ylabel("ms per decode step")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _plot_peers(cells: list[JSON], axes: Axes) -> None:
    places = range(len(cells))
    axes.bar([p - 0.2 for p in places], [c["ms_step"] for c in cells], 0.38, label="Trueline")
    axes.bar([p + 0.2 for p in places], [c["vllm_ms"] or 0 for c in cells], 0.38, color="#bbbbbb",
             label="vLLM 0.26, recorded")  # fmt: skip
    for place, cell in enumerate(cells):
        axes.hlines(cell["roofline_ms"], place - 0.4, place + 0.4, color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="roofline: bytes read once")
    axes.set_xticks(list(places), [_cell_name(cell) for cell in cells], fontsize=8)
    axes.set_title("Decode on one H200, bfloat16, random weights")


def _plot_formats(cells: list[JSON], axes: Axes) -> None:
    places = range(len(cells))
    plain = [step_ms({key: c[f"bf16_{key}"] for key in ("ms_step", "step_us")}) for c in cells]
    axes.bar([p - 0.2 for p in places], [step_ms(c) or 0 for c in cells], 0.38, label="as stored")
    axes.bar([p + 0.2 for p in places], [ms or 0 for ms in plain], 0.38, color="#bbbbbb",
             label="bfloat16, same run")  # fmt: skip
    for place, cell in enumerate(cells):
        for key, left in (("roofline_ms", place - 0.4), ("bf16_roofline_ms", place)):
            if cell[key] is not None:
                axes.hlines(cell[key], left, left + 0.4, color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="roofline: bytes read once")
    names = [f"{_cell_name(cell)}\n{cell['format']}" for cell in cells]
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_title("Decode on one H200, weights as stored, drawn at random")


def _cell_name(cell: JSON) -> str:
    return f"{cell['model']}\nB={cell['B']}" + ("\n32k" if cell["inp"] > 4096 else "")
