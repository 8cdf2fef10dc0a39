"""The program that a DeepSeek checkpoint has instead of a template: read for its constants, and
never run. Its rules are in `deepseek_v32` and `deepseek_v4`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from trueline.errors import UsageError, short_repr
from trueline.spec.source import Fact, Source, default

MOST_BYTES = 1 << 20
"""Of the program. Those published have 15 and 40 kB."""


def constants(file: Path) -> dict[str, object]:
    """What the program assigns at its top that is a plain value, and encode_messages' default
    for thinking_mode, where it has one. Empty where there is no program."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file}: {file.stat().st_size} bytes; accepted: up to {MOST_BYTES}")
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"{file}: cannot be read as Python ({short_repr(error)})") from error
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "encode_messages":
            _literal(found, "thinking_mode", _defaults(node.args).get("thinking_mode"))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    _literal(found, target.id, node.value)
    return found


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    given = [*arguments.posonlyargs, *arguments.args]
    last = given[len(given) - len(arguments.defaults) :]
    named = (*zip(last, arguments.defaults, strict=True),)
    named += (*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),)  # type: ignore[arg-type]
    return {argument.arg: value for argument, value in named}


def _literal(found: dict[str, object], name: str, node: ast.expr | None) -> None:
    try:
        found[name] = None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        found.pop(name, None)  # computed: nothing that we read


def thinking_default(
    said: Mapping[str, object], file: str, otherwise: bool, why: str
) -> Fact[bool]:
    mode = said.get("thinking_mode")
    if mode in ("thinking", "chat"):
        return Fact(mode == "thinking", Source("key", f"{file}: encode_messages"))
    return default(otherwise, why)
