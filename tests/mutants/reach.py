"""Which of the lines that mutants change a run comes to: what never ran cannot survive."""

from __future__ import annotations

import ast
import difflib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from mutants.listed import Mutant

Wanted = Mapping[str, Mapping[str, tuple[int, int] | None]]
"""By file, by mutant: the lines of the statement that it changes; None: outside of any function,
where it counts that one of the file's functions runs."""


def wanted(mutants: list[Mutant]) -> Wanted:
    found: dict[str, dict[str, tuple[int, int] | None]] = {}
    for mutant in mutants:
        if mutant.path.suffix == ".py":
            found.setdefault(mutant.file, {})[mutant.id] = changed_lines(
                mutant.path.read_text(), mutant.mutated()
            )
    return found


def changed_lines(before: str, after: str) -> tuple[int, int] | None:
    """Of the statement that the first difference is in. What is only added counts as a change of
    the line before it."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), False)
    _, first, end, _, _ = next(op for op in matcher.get_opcodes() if op[0] != "equal")
    line = first + 1 if end > first else first
    inner: ast.stmt | None = None
    in_function = False
    for node in ast.walk(ast.parse(before)):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            inner = node
            if isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno:
                in_function = True
    if inner is None or not in_function:
        return None
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body else inner.end_lineno or inner.lineno
    return inner.lineno, max(last, line)


class Reach:
    """Watches this thread and those that start meanwhile."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = {file: dict(each) for file, each in wanted.items()}
        self._reached: set[str] = set()
        self._known: dict[CodeType, tuple[str, dict[str, tuple[int, int]]] | None] = {}

    def __enter__(self) -> Reach:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def found(self) -> list[str]:
        return sorted(self._reached)

    def _of(self, code: CodeType) -> tuple[str, dict[str, tuple[int, int]]] | None:
        _, _, file = code.co_filename.rpartition("/trueline/")
        if file not in self.wanted or Path(code.co_filename).suffix != ".py":
            return None
        last = max((line for *_, line in code.co_lines() if line), default=0)
        return file, {
            name: lines
            for name, lines in self.wanted[file].items()
            if lines is not None and lines[0] <= last and code.co_firstlineno <= lines[1]
        }

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = self._of(code)
        known = self._known[code]
        if known is None or code.co_name == "<module>":
            return None
        file, lines = known
        if code.co_flags & 0x1:  # CO_OPTIMIZED: a function, not the body of a class
            self._reached |= {name for name, at in self.wanted[file].items() if at is None}
        return self._line if any(name not in self._reached for name in lines) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            known = self._known[frame.f_code]
            assert known is not None
            for name, (first, last) in known[1].items():
                if first <= frame.f_lineno <= last:
                    self._reached.add(name)
        return self._line
