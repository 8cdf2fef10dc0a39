"""Results and comparisons as tables for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trueline.errors import short
from trueline.evaluate.diff import DiffFigures, PairFigures
from trueline.evaluate.figures import Accuracy, Figures, Part
from trueline.utils.json_types import JSON

LONGEST_TEXT = 300
"""Characters of an output that are shown: its end, where the answer is."""


def print_results(console: Console, results: JSON) -> None:
    figures: Figures = results["figures"]
    settings, speed = results["settings"], results["speed"]
    several = figures["samples"] > figures["items"]
    counted = f"{figures['samples']} samples of {figures['items']} items"
    shots = f"{settings['num_fewshot']}-shot" if settings["num_fewshot"] else "zero-shot"
    console.print(
        f"{settings['task']}, {settings['form']}, {shots}, {settings['model']['name']}: "
        + (counted if several else f"{figures['items']} items"),
        markup=False,
    )
    table = Table("", "items", *figures["matches"], box=box.SIMPLE_HEAD)
    _add_part(table, "all", figures)
    for title, parts in (
        ("category", figures["categories"]),
        ("prompt tokens", figures["prompt_lengths"]),
    ):
        if len(parts) > 1:
            table.add_section()
            for name, part in parts.items():
                _add_part(table, f"{title} {name}" if title != "category" else name, part)
    console.print(table)
    reasons = ", ".join(f"{count} {name}" for name, count in figures["finish_reasons"].items())
    console.print(f"ended by: {reasons}", markup=False)
    if figures["errors"]:
        console.print(
            f"{figures['errors']} ended in error, and count as wrong; the first: "
            f"{figures['first_error']}",
            markup=False,
        )
    rate = speed["tokens_per_s"]
    console.print(
        f"{figures['prompt_tokens']:,} prompt tokens, {figures['generated_tokens']:,} generated"
        + (f"; {speed['seconds']:.1f} s, {rate:,.0f} tokens/s" if rate else ""),
        markup=False,
    )


def _add_part(table: Table, name: str, part: Part) -> None:
    cells = (_percent(accuracy) for accuracy in part["matches"].values())
    table.add_row(Text(name), str(part["items"]), *cells)


def _percent(accuracy: Accuracy) -> str:
    low, high = accuracy["interval"]
    return f"{accuracy['accuracy']:6.1%}  ({low:.1%} – {high:.1%})"


def print_diff(console: Console, found: DiffFigures) -> None:
    table = Table(
        "", "items", "both", "only A", "only B", "neither", "A", "B", "B − A (95 %)", "p",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    _add_pairs(table, f"all, match {found['match']}", found)
    for name, part in found["categories"].items():
        _add_pairs(table, name, part)
    console.print(table)
    console.print(
        f"{found['texts_differ']} of {found['samples']} texts differ; p is McNemar's, exact",
        markup=False,
    )
    for side, errors in (("A", found["errors_a"]), ("B", found["errors_b"])):
        if errors:
            console.print(f"{side}: {errors} ended in error, and count as wrong", markup=False)
    for one in found["differing"]:
        console.print(
            f"\nitem {one['item']}, sample {one['sample']}, answer {one['answer']}", markup=False
        )
        for side, text, right in (
            ("A", one["text_a"], one["right_a"]),
            ("B", one["text_b"], one["right_b"]),
        ):
            mark = "right" if right else "wrong"
            console.print(f"  {side} ({mark}): {_end(text)}", markup=False)


def _add_pairs(table: Table, name: str, pairs: PairFigures) -> None:
    low, high = pairs["interval"]
    counts = (pairs["items"], pairs["both"], pairs["only_a"], pairs["only_b"], pairs["neither"])
    table.add_row(
        Text(name),
        *map(str, counts),
        f"{pairs['accuracy_a']:.1%}",
        f"{pairs['accuracy_b']:.1%}",
        f"{pairs['difference']:+.1%} ({low:+.1%} – {high:+.1%})",
        f"{pairs['p']:.3g}",
    )


def _end(text: str) -> str:
    """The end of an output on one line, without what would command a terminal."""
    line = "".join(char if char.isprintable() else "�" for char in " ".join(text.split()))
    return short(line[::-1], LONGEST_TEXT)[::-1]
