"""Write the parts of docs/ that follow from the code: `make docs`. A test keeps them current."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from api import api_page
from picture import picture
from trueline.verify.faults.table import FAULTS

HERE = Path(__file__).parent


def faults_page() -> str:
    checks = sorted({fault.check for fault in FAULTS})
    lines = [
        "# Seeded faults",
        "",
        "Known mistakes, put into the running package one at a time. Each must turn the named",
        "check red on the named tiny model, and the same check is green without it:",
        "`pytest tests/verify/test_faults.py`. Made by `make docs` from `trueline/verify/faults/`.",
        "",
        f"{len(FAULTS)} faults, {len(checks)} checks, all caught.",
        "",
        "| fault | what is wrong | goes red | on |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{f.id}` | {f.what} | {f.check} | {f.case} |" for f in FAULTS]
    return "\n".join(lines) + "\n"


def inspect_picture(file: Path) -> None:
    """What `inspect` shows, as it looks in a terminal."""
    from rich.console import Console

    from trueline.cli import inspect as inspect_verb
    from trueline.describe import describe
    from trueline.tiny.configs import family_config
    from trueline.tiny.make import TinyOptions, make_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "deepseek_v3"
        make_checkpoint(model, family_config("deepseek_v3"), TinyOptions())
        report = describe(model) | {"config": "tiny/deepseek_v3/config.json"}
    console = Console(record=True, width=112, highlight=False, file=io.StringIO())
    inspect_verb.print_report(console, report)
    svg = console.export_svg(title="trueline inspect tiny/deepseek_v3")
    # the picture must not fetch fonts from elsewhere
    file.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL))


PAGES = {"api.md": api_page, "architecture.svg": picture, "faults.md": faults_page}
"""Each a function of the source alone."""


if __name__ == "__main__":
    for name, made in PAGES.items():
        (HERE / name).write_text(made())
    inspect_picture(HERE / "inspect.svg")
