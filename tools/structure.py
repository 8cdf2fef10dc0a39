"""How the source is built, counted: what a request runs through, and what readers stumble over.

    python tools/structure.py [REV ...]        # a column each; without, the checkout as it is
    python tools/structure.py --details REV    # also what was counted

Revisions are checked out into temporary worktrees and measured with this script and the packages
installed here, so that all columns mean the same. docs/results/structure.md keeps them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LONG, MANY = 60, 5
# STYLE.md, section 7: what was found in place of a word that the field has.
IDENTIFIERS = frozenset(
    """no_long_pauses bits_are_steady wait_turn launches_early Choice Answer Copy news Story Drawn
    Made Pending ladder rehearse FixedInputs Sums Door Link obey aside _Life told readers copiers
    paired deal top_positions head_product linear_inputs turn_heads""".split()
)
FILES = frozenset(
    """pauses steady pieces kernel choices sizes answers aside link child meter frames halves seed
    work locate crowd parts top_positions head_product linear_inputs""".split()
)
# Ordinary words of the same table: right where they mean what the glossary says.
ORDINARY = frozenset("turn product floor slots parts pairs halves whole take Kind Run Step".split())


@dataclass
class Column:
    """Name and value of each row, and what is behind it."""

    rows: dict[str, str] = field(default_factory=dict)
    details: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, value: object, details: list[str] | None = None) -> None:
        self.rows[name] = f"{value:,}" if isinstance(value, int) else str(value)
        if details:
            self.details[name] = details


@dataclass(frozen=True)
class Source:
    """A file of the package."""

    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split("/")[0].removesuffix(".py")


def sources(package: Path) -> list[Source]:
    return [
        Source(str(file.relative_to(package)), text := file.read_text(), ast.parse(text))
        for file in sorted(package.rglob("*.py"))
    ]


# -- read off the source -----------------------------------------------------------------


def nodes(files: list[Source], *kinds: type[ast.AST]) -> Iterator[tuple[Source, Any]]:
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, kinds):
                yield file, node


def long_functions(files: list[Source]) -> list[str]:
    """From `def` to the last line, docstring included."""
    found = []
    for file, node in nodes(files, ast.FunctionDef, ast.AsyncFunctionDef):
        length = node.end_lineno - node.lineno + 1
        if length > LONG:
            found.append(f"{file.name}:{node.lineno} {node.name} ({length})")
    return found


def calls_of(files: list[Source], name: str) -> list[str]:
    return [
        f"{file.name}:{node.lineno}"
        for file, node in nodes(files, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == name
    ]


def positional_constructors(files: list[Source]) -> list[str]:
    """Calls of a class of the package with more than five positional arguments."""
    classes = {node.name for _, node in nodes(files, ast.ClassDef)}
    found = []
    for file in files:
        known = _own_names(file) & classes
        for _, node in nodes([file], ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            plain = isinstance(called, ast.Name)
            if len(node.args) > MANY and (name in known if plain else name in classes):
                found.append(f"{file.name}:{node.lineno} {name} ({len(node.args)})")
    return found


def _own_names(file: Source) -> set[str]:
    """Defined in the file or imported from the package."""
    names = {node.name for _, node in nodes([file], ast.ClassDef)}
    for _, node in nodes([file], ast.ImportFrom):
        if (node.module or "").split(".")[0] == "trueline":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def identifiers(files: list[Source], words: frozenset[str]) -> Counter[str]:
    """How often each is written as a name: defined, used, given or asked for."""
    found: Counter[str] = Counter()
    for _, node in nodes(files, ast.AST):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found[name] += 1
            case ast.ClassDef(name=name) | ast.Name(id=name) | ast.arg(arg=name):
                found[name] += 1
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found[name] += 1
            case ast.ImportFrom(names=aliases):
                found.update(alias.name for alias in aliases)
    return Counter({name: count for name, count in found.items() if name in words})


def file_names(root: Path) -> list[str]:
    """Files and folders of the package and its tests."""
    found = set()
    for top in (root / "src" / "trueline", root / "tests"):
        for path in top.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            for depth, part in enumerate(parts, 1):
                if part.removeprefix("test_") in FILES:
                    found.add("/".join(parts[:depth]))
    return sorted(found)


def count_source(root: Path, column: Column) -> None:
    files = sources(root / "src" / "trueline")
    lines = sum(len(file.text.splitlines()) for file in files)
    asked = [file for file in files if file.room in ("layers", "ops")]
    column.add("lines of Python in src", lines)
    word = sum(len(re.findall(r"\bAny\b", file.text)) for file in files)
    column.add("`Any` per 1,000 lines", f"{1000 * word / lines:.1f}")
    found = long_functions(files)
    column.add(f"functions over {LONG} lines", len(found), found)
    found = positional_constructors([file for file in files if "verify/" not in file.name])
    column.add(f"constructors with over {MANY} positional arguments", len(found), found)
    rows = positional_constructors([file for file in files if "verify/" in file.name])
    column.add("the same in verify (rows of its tables)", len(rows))
    found = calls_of(asked, "hasattr")
    column.add("`hasattr` in layers and ops", len(found), found)
    words = identifiers(files, IDENTIFIERS)
    told = [f"{name} {count}" for name, count in words.most_common()]
    column.add("private words: identifiers", f"{len(words)} ({words.total():,} uses)", told)
    found = file_names(root)
    column.add("private words: files and folders", len(found), found)
    words = identifiers(files, ORDINARY)
    told = [f"{name} {count}" for name, count in words.most_common()]
    column.add("ordinary words of the table, uses", words.total(), told)
    homes: Counter[str] = Counter(node.name for _, node in nodes(files, ast.ClassDef))
    several = sorted(f"{name} {count}" for name, count in homes.items() if count > 1)
    column.add("class names with several meanings", len(several), several)


# -- measured on a run ---------------------------------------------------------------------


def count_run(root: Path, column: Column) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "TRITON_INTERPRET": "1"}
        command = [sys.executable, str(HERE / "structure_probe.py"), scratch]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        column.add("a request's path", "not measured: its words are above")
        return
    found = json.loads(done.stdout.splitlines()[-1])
    for key, name in (("offline", "offline"), ("wide", "with graphs, hybrid, sparse")):
        own = {file: each for file, each in found[key].items() if not file.startswith("ops/")}
        for what, files in ((name, own), (f"{name}, ops too", found[key])):
            told = [f"{file} {lines}" for file, (lines, _) in files.items()]
            whole, ran = (sum(each[i] for each in files.values()) for i in (0, 1))
            column.add(f"files on the path, {what}", len(files), told)
            column.add(f"their lines (of functions that ran), {what}", f"{whole:,} ({ran:,})")
    objects = found["objects"]
    column.add("objects of a request", len(objects["lasting"]), objects["lasting"])
    column.add("further ones in each step", len(objects["brief"]), objects["brief"])
    column.add("its ids", len(objects["ids"]), objects["ids"])
    column.add("lists that hold its prompt", objects["token_lists"])


# -- columns -------------------------------------------------------------------------------


def measure(root: Path) -> Column:
    column = Column()
    count_run(root, column)
    count_source(root, column)
    return column


def at_revision(revision: str) -> Column:
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            return measure(tree)
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


def table(columns: dict[str, Column]) -> str:
    names = list(dict.fromkeys(name for column in columns.values() for name in column.rows))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = (column.rows.get(name, "") for column in columns.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="*", help="default: the checkout as it is")
    parser.add_argument("--details", action="store_true", help="what was counted, too")
    given = parser.parse_args()
    columns = {name: at_revision(name) for name in given.revision} or {"here": measure(ROOT)}
    print(table(columns))
    for name, column in columns.items() if given.details else ():
        for row, details in column.details.items():
            print(f"\n{name}, {row}:", *details, sep="\n  ")


if __name__ == "__main__":
    main()
