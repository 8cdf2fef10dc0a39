"""A model in a stored format beside the same in bfloat16, measured in one run: rows for tables."""

from __future__ import annotations

from collections.abc import Iterator

from trueline.utils.json_types import JSON

PLAIN = "bfloat16"
SHARE, SHARE_BATCHES = 0.75, (16, 64)
"""Target: of the roofline, at so many requests."""
LARGEST_RATIO = 1.03
"""Target: of loaded bytes to the checkpoint's."""


def decode_rows(found: list[JSON]) -> list[JSON]:
    """One per cell of a stored format."""
    rows = []
    for model, cell, plain in _beside(found, "decode"):
        row = cell | {"format": model["format"]}
        row |= {f"bf16_{key}": plain.get(key) for key in ("ms_step", "step_us", "roofline_ms")}
        ours, theirs = step_ms(cell), step_ms(plain)
        if ours is not None:
            row["of_roofline"] = cell["roofline_ms"] / ours
            row["speedup"] = theirs / ours if theirs is not None else None
            enough = cell["B"] not in SHARE_BATCHES or row["of_roofline"] >= SHARE
            row["met"] = enough and (row["speedup"] is None or row["speedup"] > 1)
        rows.append(row)
    return rows


def prefill_rows(found: list[JSON]) -> list[JSON]:
    rows = []
    for model, cell, plain in _beside(found, "prefill"):
        row = cell | {"format": model["format"], "bf16_tok_s": plain.get("tok_s")}
        if "tok_s" in cell and "tok_s" in plain:
            row["speedup"] = cell["tok_s"] / plain["tok_s"]
            row["met"] = row["speedup"] > 1
        rows.append(row)
    return rows


def memory_rows(found: list[JSON]) -> list[JSON]:
    rows = []
    for model in found:
        memory = model["memory"]
        ratio = memory["loaded_bytes"] / memory["checkpoint_bytes"]
        about = {"model": model["model"], "format": model["format"], "start_s": model["start_s"]}
        rows.append(about | memory | {"ratio": ratio, "met": ratio <= LARGEST_RATIO})
    return rows


def step_ms(cell: JSON) -> float | None:
    """As served; on the device, where it was not."""
    if cell.get("ms_step") is not None:
        return float(cell["ms_step"])
    on_device = cell.get("step_us")
    return None if on_device is None else float(on_device) / 1000


def _beside(found: list[JSON], what: str) -> Iterator[tuple[JSON, JSON, JSON]]:
    """A model in a stored format, each of its cells, and the same cell in bfloat16; empty where
    that has failed."""
    plain = {
        (model["model"], cell["B"], cell["inp"]): cell
        for model in found
        if model["format"] == PLAIN
        for cell in model[what]
    }
    for model in found:
        if model["format"] != PLAIN:
            for cell in model[what]:
                yield model, cell, plain.get((model["model"], cell["B"], cell["inp"]), {})
