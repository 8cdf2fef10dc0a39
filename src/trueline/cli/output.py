"""Printing, for all verbs: data goes to stdout, messages to stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def tables() -> Console:
    """A console for tables: as wide as the terminal, and wide enough where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    return console
