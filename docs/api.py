"""docs/api.md: the public classes and the plug-in contracts, read off the source with their
docstrings. Nothing is imported, so that the page is the same on every machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "trueline"
CLASSES = (
    ("LLM", "llm.py"),
    ("LLMEngine", "llm.py"),
    ("SamplingParams", "engine/params.py"),
    ("StructuredOutputsParams", "grammar/structured.py"),
    ("RequestOutput", "outputs.py"),
    ("CompletionOutput", "outputs.py"),
    ("Logprob", "outputs.py"),
    ("EngineConfig", "config.py"),
)
CONTRACTS = (
    ("Executor", "engine/executor.py"),
    ("StateKind", "cache/kinds/__init__.py"),
    ("PagedKind", "cache/kinds/__init__.py"),
    ("PagedStore", "cache/kinds/__init__.py"),
    ("SlottedKind", "cache/kinds/__init__.py"),
    ("SlottedStore", "cache/kinds/__init__.py"),
)
VERIFY = (
    ("verify", "verify/library.py"),
    ("replay_file", "verify/replay/rerun.py"),
    ("logprob_mismatch", "verify/mismatch.py"),
    ("Mismatch", "verify/mismatch.py"),
    ("Drift", "verify/mismatch.py"),
    ("Explained", "verify/mismatch.py"),
    ("recorded_choices", "verify/recorded.py"),
    ("replayed_logprobs", "verify/recorded.py"),
    ("Choices", "verify/recorded.py"),
)
PUBLIC_CALLS = ("__init__",)
COLUMNS = 88
HEAD = """# API reference

Made by `make docs` from the docstrings. `LLM`, `LLMEngine`, `SamplingParams` and the results are
imported from `trueline`; options of `LLM` that are not in its signature are the fields of
`EngineConfig`. What they mean is in [engine.md](engine.md), how to register a plug-in in
[plugins.md](plugins.md). `trueline.verify` has functions of its own.
"""


def api_page() -> str:
    parts = [HEAD]
    parts += [class_section(name, file) for name, file in CLASSES]
    parts.append("# trueline.verify\n\nWhat it is for: [verify.md](verify.md#as-a-library).\n")
    parts += [section(name, file) for name, file in VERIFY]
    parts.append("# Contracts\n\nWhat an implementation must do, ours or another package's.\n")
    parts += [class_section(name, file) for name, file in CONTRACTS]
    parts += [op_section(folder) for folder in op_folders()]
    return "\n".join(parts)


# -- classes -----------------------------------------------------------------------------


def section(name: str, file: str) -> str:
    """Of a class or a function."""
    tree = parsed(PACKAGE / file)
    if any(isinstance(n, ast.ClassDef) and n.name == name for n in tree.body):
        return class_section(name, file)
    (node,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    head = [f"## {name}", "", f"[`trueline/{file}`](../src/trueline/{file})", ""]
    return "\n".join([*head, *method_lines(node)])


def class_section(name: str, file: str) -> str:
    tree = parsed(PACKAGE / file)
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    lines = [f"## {name}", "", f"[`trueline/{file}`](../src/trueline/{file})", ""]
    lines += [doc(node), ""] if ast.get_docstring(node) else []
    rows = [field_row(*each) for each in fields(node)]
    if rows:
        lines += ["| field | type | default | |", "|---|---|---|---|", *rows, ""]
    for method in methods(node):
        lines += method_lines(method)
    return "\n".join(lines)


def fields(node: ast.ClassDef) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Each with the string below it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if "ClassVar" in ast.unparse(item.annotation):
                continue
            words = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                words = " ".join(str(after.value.value).split())
            yield item, words


def field_row(item: ast.AnnAssign, words: str) -> str:
    default = "" if item.value is None else code(default_of(item.value))
    name, kind = code(ast.unparse(item.target)), code(ast.unparse(item.annotation))
    return f"| {name} | {kind} | {default} | {cell(words)} |"


def default_of(value: ast.expr) -> str:
    """What a dataclass field's factory makes, as it is written."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        for keyword in value.keywords:
            if keyword.arg == "default_factory":
                return f"{ast.unparse(keyword.value)}()"
    return ast.unparse(value)


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (
            not item.name.startswith("_") or item.name in PUBLIC_CALLS
        ):
            yield item


def method_lines(method: ast.FunctionDef) -> list[str]:
    plain = any(ast.unparse(each) == "property" for each in method.decorator_list)
    returns = f" -> {ast.unparse(method.returns)}" if method.returns else ""
    given = [] if plain else list(arguments(method.args))
    line = f"{method.name}{'' if plain else '(' + ', '.join(given) + ')'}{returns}"
    if len(line) > COLUMNS:
        given = [f"    {each}," for each in given]
        line = "\n".join([f"{method.name}(", *given, f"){returns}"])
    lines = ["```python", line, "```", ""]
    return [*lines, doc(method), ""] if ast.get_docstring(method) else lines


def arguments(args: ast.arguments) -> Iterator[str]:
    """As they are written, one by one."""
    plain = [*args.posonlyargs, *args.args]
    none: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    for argument, default in zip(plain, [*none, *args.defaults], strict=True):
        if argument.arg not in ("self", "cls"):
            yield _argument(argument, default)
    if args.vararg or args.kwonlyargs:
        yield f"*{ast.unparse(args.vararg) if args.vararg else ''}"
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(argument, default)
    if args.kwarg:
        yield f"**{ast.unparse(args.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default else "")


# -- ops ---------------------------------------------------------------------------------


def op_folders() -> list[Path]:
    return sorted(path.parent for path in (PACKAGE / "ops").glob("*/reference.py"))


def op_section(folder: Path) -> str:
    """The module's docstring is the contract; a Protocol, where it has one, the signatures."""
    tree = parsed(folder / "__init__.py")
    where = f"ops/{folder.name}/__init__.py"
    lines = [f"## Op `{folder.name}`", "", f"[`trueline/{where}`](../src/trueline/{where})", ""]
    lines += [doc(tree), ""]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in node.bases):
            lines += [f"`{node.name}`:", ""]
            lines += [line for method in methods(node) for line in method_lines(method)]
    return "\n".join(lines)


# -- text --------------------------------------------------------------------------------


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    """Examples become code."""
    lines = (ast.get_docstring(node) or "").splitlines()
    return "\n".join(f"    {line}" if line.startswith((">>>", "...")) else line for line in lines)


def code(words: str) -> str:
    return f"`{cell(words)}`"


def cell(words: str) -> str:
    return words.replace("|", "\\|")
