"""`trueline inspect`: every fact that decides a model's numbers, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trueline.cli.arguments import model_or_default, parse_facts
from trueline.cli.completion import MODEL
from trueline.cli.output import tables
from trueline.describe import describe, layer_ranges
from trueline.errors import UsageError
from trueline.utils.hub import find_model
from trueline.utils.json_types import JSON
from trueline.utils.progress import human_bytes, human_count, progress_bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def inspect_model(
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    read_weights: Annotated[bool, Parameter(negative=())] = False,
    fact: tuple[str, ...] = (),
) -> int:
    """Show every resolved fact of a model with its source, its sizes, and its checkpoint's ledger.

    Works on a config.json alone. Ends with exit code 1 if the checkpoint does not match it.

    Parameters
    ----------
    model
        A model directory, a built-in model, a hub id (owner/name), or a config.json. Default:
        the built-in witness-v3. Of a hub's weights, only --read-weights fetches those that are
        not in the local cache.
    as_json
        Print one JSON object instead of tables.
    read_weights
        Also read every weight once, looking for NaN and Inf.
    fact
        Override a fact that published sources contradict each other on, as NAME=VALUE
        (known: latent_norm_eps, linear_layer_factor). May be given several times.
    """
    overrides = parse_facts(fact)
    path = _path(model_or_default(model), read_weights)
    report = describe(path, overrides)
    if read_weights:
        report["weights_read"] = _read_weights(path, overrides)
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print_report(tables(), report)
    checkpoint = report["checkpoint"] or {}
    bad = checkpoint.get("balanced") is False or report.get("weights_read", {}).get("not_finite")
    return 1 if bad else 0


def _path(model: str, weights: bool) -> Path:
    file = Path(model)
    return file if file.is_file() else find_model(model, weights=weights)


def _read_weights(model: Path, overrides: JSON) -> JSON:
    import torch

    from trueline.models import read_model
    from trueline.weights.checkpoint import open_checkpoint
    from trueline.weights.load import stream_weights

    checkpoint = open_checkpoint(model)
    if checkpoint is None:
        raise UsageError(f"{model}: --read-weights needs a directory with *.safetensors files")
    count = 0
    bad: list[str] = []
    with progress_bar("reading weights") as progress:
        for name, numbers in stream_weights(checkpoint, read_model(model, overrides), progress):
            count += numbers.numel()
            if not bool(torch.isfinite(numbers).all()) and name not in bad:
                bad.append(name)
    return {"numbers": count, "not_finite": bad}


# -- tables ----------------------------------------------------------------------------


def print_report(console: Console, report: JSON) -> None:
    console.print(f"[bold]{report['family']}[/]  {report['config']}", soft_wrap=True)
    if not report["runnable"]:
        console.print(f"[yellow]{report['not_runnable']}[/]")
    if report["refused_inputs"]:
        console.print(f"refused inputs: {', '.join(report['refused_inputs'])}")
    table = _table("fact", "value", "from")
    _add_facts(table, "model", report["family"], report["facts"])
    if report["hyper_connections"]:
        _add_node(table, report["hyper_connections"], "residual")
    for part in ("mixer", "feed_forward"):
        for node, layers, source in _distinct(report["layer_kinds"], part):
            where = f"layer{'s' if len(layers) > 1 else ''} {layer_ranges(layers)}"
            _add_node(table, node, where, source)
    _add_node(table, report["storage"], "stored as")
    if report["chat"]:
        _add_node(table, report["chat"], "chat")
    console.print(table)
    _print_sizes(console, report)
    _print_checkpoint(console, report)


def _distinct(kinds: list[JSON], part: str) -> list[tuple[JSON, list[int], str | None]]:
    """Each different mixer (or feed-forward) once, with all its layers."""
    found: list[tuple[JSON, list[int], str | None]] = []
    for kind in kinds:
        same = next((layers for node, layers, _ in found if node == kind[part]), None)
        if same is None:
            found.append((kind[part], list(kind["layers"]), kind[f"{part}_source"]))
        else:
            same.extend(kind["layers"])
    return [(node, sorted(layers), source) for node, layers, source in found]


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _add_node(
    table: Table, node: JSON, title: str, source: str | None = None, indent: str = ""
) -> None:
    _add_facts(table, indent + title, node["kind"], node["facts"], source, indent)
    for name, inner in node.items():
        if isinstance(inner, dict) and "facts" in inner:
            _add_node(table, inner, name, indent=indent + "  ")


def _add_facts(
    table: Table,
    title: str,
    kind: str,
    facts: list[JSON],
    source: str | None = None,
    indent: str = "",
) -> None:
    table.add_section()
    note = f" ([cyan]{source}[/])" if source else ""
    table.add_row(f"[bold]{title}[/]", "", f"[bold]{kind}[/]{note}")
    for fact in facts:
        origin = fact["source"]
        if fact["from"] != "key":
            origin = f"[cyan]{fact['from']}:[/] {origin}"
        table.add_row(f"{indent}  {fact['name']}", _show(fact["value"]), origin)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list):
        return ", ".join(map(_show, value)) or "none"
    return "none" if value is None else str(value)


def _print_sizes(console: Console, report: JSON) -> None:
    counts = report["parameters"]
    table = _table("size", "")
    table.add_row("parameters", f"{counts['total']:,} ({human_count(counts['total'])})")
    table.add_row(
        "  multiplied for one token", f"{counts['active']:,} ({human_count(counts['active'])})"
    )
    for cost in report["cache"]:
        where = f"{cost['kind']}, {cost['layers']} layers"
        if cost["bytes_per_token"]:
            table.add_row(f"cache per token ({where})", human_bytes(cost["bytes_per_token"]))
        parts = cost["fields"] if cost["kind"].startswith("compressed") else {}
        if state := cost["state_bytes_per_sequence"]:
            dtype = "" if parts else ", float32"
            table.add_row(f"state per sequence ({where}{dtype})", human_bytes(state))
        for name, size in parts.items():
            table.add_row(f"  {name}", human_bytes(size))
    if latents := report["fp8_latents"]:
        how = f"{latents['storage']}, a scale per {latents['group_size']} channels"
        table.add_row(f"latents per token in {how}", human_bytes(latents["bytes_per_token"]))
    console.print(table)


def _print_formats(console: Console, formats: JSON) -> None:
    """What is stored in each: scales count with their weights."""
    table = _table("stored in", "weights", "parameters", "size", "bits a parameter")
    for label, stored in formats.items():
        table.add_section()
        rows = {label: stored, **{f"  {group}": each for group, each in stored["groups"].items()}}
        for name, row in rows.items():
            counts = str(row["weights"]), human_count(row["parameters"])
            table.add_row(name, *counts, human_bytes(row["bytes"]), f"{row['bits']:g}")
    console.print(table)


def _print_checkpoint(console: Console, report: JSON) -> None:
    checkpoint = report["checkpoint"]
    if checkpoint is None:
        console.print("checkpoint: no weight files here; the facts come from the config alone")
        return
    table = _table("checkpoint", "tensors", "size")
    for dtype, stored in checkpoint["dtypes"].items():
        table.add_row(f"stored {dtype}", str(stored["tensors"]), human_bytes(stored["bytes"]))
    table.add_row("in all", str(checkpoint["tensors"]), human_bytes(checkpoint["bytes"]))
    if "refused" in checkpoint:
        console.print(table)
        console.print(f"[yellow]cannot be loaded:[/] {checkpoint['refused']}", soft_wrap=True)
        return
    table.add_section()
    table.add_row("used exactly once", str(checkpoint["used"]), "")
    for reason, unused in checkpoint["unused_by_choice"].items():
        table.add_row(f"unused, {reason}", str(unused["tensors"]), human_bytes(unused["bytes"]))
    for what in ("missing", "unexpected", "wrong"):
        table.add_row(what, str(len(checkpoint[what])), "")
    console.print(table)
    _print_formats(console, checkpoint["formats"])
    for note in checkpoint["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for what in ("missing", "unexpected", "wrong"):
        for line in checkpoint[what][:8]:
            console.print(f"{what}: {line}", markup=False, style="red", soft_wrap=True)
    if read := report.get("weights_read"):
        bad = read["not_finite"]
        found = f"NaN or Inf in {', '.join(bad[:4])}" if bad else "all finite"
        console.print(f"read {read['numbers']:,} weights: {found}")
    console.print(
        "[green]ledger balanced[/]" if checkpoint["balanced"] else "[red]ledger not balanced[/]"
    )
