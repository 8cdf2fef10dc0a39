"""What `trueline bench gpu` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueline.cli.output import tables
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_models(figures: JSON) -> None:
    """In bfloat16, beside peers."""
    console = tables()
    columns = ("decode", "ms/step", "on device", "vLLM", "roofline", "target", "met", "to vLLM",
               "of roofline", "launches/layer")  # fmt: skip
    table = _table(*columns)
    for row in figures["decode"]:
        name = f"{row['model']} B={row['B']} {row['inp'] // 1024}k"
        if "error" in row:
            table.add_row(name, row["error"][:60])
            continue
        table.add_row(
            name, f"{row['ms_step']:.2f}", _or_dash(row.get("step_us"), 1e-3),
            _or_dash(row["vllm_ms"]), f"{row['roofline_ms']:.2f}", f"{row['target_ms']:.1f}",
            "yes" if row["met"] else "no", _or_dash(row["to_vllm"]), f"{row['of_roofline']:.0%}",
            _or_dash(row.get("launches_per_layer")),
        )  # fmt: skip
    _show(console, table)
    table = _table("prefill", "tokens/s", "vLLM", "to vLLM", "met")
    for row in figures["prefill"]:
        name = f"{row['model']} {row['B']} × {row['inp']}"
        if "error" in row:
            table.add_row(name, row["error"][:60])
            continue
        table.add_row(name, f"{row['tok_s']:,.0f}", _or_dash(row["vllm_tok_s"]),
                      _or_dash(row.get("to_vllm")), "yes" if row.get("met") else "no")  # fmt: skip
    _show(console, table)
    table = _table("kernel", "µs", "vLLM's Triton", "best peer", "", "to best")
    for row in figures["kernel_cells"]:
        times = (f"{row[key]:.1f}" for key in ("us", "vllm_us", "best_us"))
        table.add_row(row["cell"], *times, row["best_peer"], f"{row['to_best']:.2f}")
    _show(console, table)
    for row in figures["start"]:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases"].items())
        console.print(
            f"start to ready, {row['model']}: {row['s']:.1f} s (vLLM {_or_dash(row['vllm_s'])}): "
            f"{phases}"
        )


def _or_dash(value: float | None, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:,.2f}"


def print_formats(figures: JSON) -> None:
    """In stored formats, beside bfloat16."""
    console = tables()
    _print_format_decode(console, figures["format_decode"])
    table = _table("prefill", "format", "tokens/s", "bfloat16", "ratio", "met")
    for row in figures["format_prefill"]:
        name = f"{row['model']} {row['B']} × {row['inp']}"
        if "error" in row:
            table.add_row(name, row["format"], row["error"][:60])
            continue
        table.add_row(name, row["format"], f"{row['tok_s']:,.0f}", _or_dash(row["bf16_tok_s"]),
                      _or_dash(row.get("speedup")), _met(row))  # fmt: skip
    _show(console, table)
    table = _table("weights", "format", "loaded GB", "checkpoint GB", "ratio", "met",
                   "host GB at start", "start to ready, s")  # fmt: skip
    for row in figures["format_memory"]:
        table.add_row(
            row["model"], row["format"], _or_dash(row["loaded_bytes"], 1e-9),
            _or_dash(row["checkpoint_bytes"], 1e-9), f"{row['ratio']:.3f}", _met(row),
            _or_dash(row["host_peak_bytes"], 1e-9), f"{row['start_s']:.1f}",
        )  # fmt: skip
    _show(console, table)
    for model in figures["formats"]:
        for label, ops in model["implementations"].items():
            names = ", ".join(f"{op}={name}" for op, name in ops.items())
            console.print(f"{model['model']}, {label}: {names}")
    _print_format_kernels(console, figures["format_kernels"])


def print_exchange(rows: list[JSON]) -> None:
    table = _table("captured step", "without, µs", "with NCCL, µs", "ratio", "met")
    for row in rows:
        table.add_row(
            f"{row['model']} B={row['B']}, one rank", f"{row['without_us']:,.1f}",
            f"{row['with_us']:,.1f}", f"{row['ratio']:.3f}", _met(row),
        )  # fmt: skip
    _show(tables(), table)


def _print_format_decode(console: Console, rows: list[JSON]) -> None:
    table = _table("decode", "format", "ms/step", "on device", "bfloat16", "on device",
                   "times as fast", "roofline", "of roofline", "met")  # fmt: skip
    for row in rows:
        name = f"{row['model']} B={row['B']} {row['inp'] // 1024}k"
        if "error" in row:
            table.add_row(name, row["format"], row["error"][:60])
            continue
        table.add_row(
            name, row["format"], _or_dash(row.get("ms_step")), _or_dash(row.get("step_us"), 1e-3),
            _or_dash(row["bf16_ms_step"]), _or_dash(row["bf16_step_us"], 1e-3),
            _or_dash(row.get("speedup")), f"{row['roofline_ms']:.2f}",
            _or_dash(row.get("of_roofline")), _met(row),
        )  # fmt: skip
    _show(console, table)


def _print_format_kernels(console: Console, rows: list[JSON]) -> None:
    table = _table("kernel", "rows", "per expert", "implementation", "µs", "of bytes' roofline",
                   "TFLOP/s", "GEMMs alone", "bfloat16 µs", "cuBLAS µs", "off", "met")  # fmt: skip
    for row in rows:
        if "us" not in row:
            table.add_row(row["op"], "", row["error"][:60])
            continue
        us, each = row["us"], row.get("rows_per_expert")
        table.add_row(
            f"{row['op']} {row['of']}, {row['format']}", f"{row['rows']:,}",
            "–" if each is None else f"{each:,.1f}", row["implementations"]["stored"],
            f"{us['stored']:,.1f}", f"{row['of_roofline']:.0%}", f"{row['tflops']:,.0f}",
            _or_dash(row.get("gemm_tflops")), f"{us['bfloat16']:,.1f}", _or_dash(us.get("cublas")),
            row.get("error", f"{row['off']:.1e}"), _met(row),
        )  # fmt: skip
    _show(console, table)


def _met(row: JSON) -> str:
    """Whether the target is, if there is one."""
    return "–" if row.get("met") is None else "yes" if row["met"] else "no"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD)


def _show(console: Console, table: Table) -> None:
    """Parts that were not measured have no table."""
    if table.rows:
        console.print(table)
