"""The list of `make mutants` fits the source: it cannot rot silently. Running it takes longer."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from itertools import accumulate

import pytest

from mutants import page
from mutants.listed import SOURCE, TESTS, Mutant, load

MUTANTS = load()
LEAST = 80
LEAST_OF_AN_AREA = 5


@cache
def _functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def _ends(text: str) -> list[int]:
    """Of a module's statements, as characters from its start."""
    lines = [0, *accumulate(len(line) + 1 for line in text.split("\n"))]
    return [lines[node.end_lineno or 0] for node in ast.parse(text).body]


def _around(text: str, old: str) -> str:
    """The statements of the module in which a mutant's text stands: the others stay as they are."""
    start, ends = text.index(old), [0, *_ends(text), len(text)]
    first = max(end for end in ends if end <= start)
    return text[first : min(end for end in ends if end >= start + len(old))]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_fits(mutant: Mutant) -> None:
    text = mutant.path.read_text()
    assert text.count(mutant.old) == 1, f"'{mutant.old}' must stand once in {mutant.file}"
    part = _around(text, mutant.old) if mutant.path.suffix == ".py" else text
    changed = part.replace(mutant.old, mutant.new)
    if mutant.path.suffix == ".py":
        ours, theirs = (ast.dump(ast.parse(each)) for each in (part, changed))
        assert ours != theirs, "another text and the same program"
    else:
        assert part.split() != changed.split()
    assert mutant.tests, "somebody must see it"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"{test} does not exist"
        assert not name or name.partition("[")[0] in _functions(file), f"{test} does not exist"


def test_the_list_covers_every_part() -> None:
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(m.id for m in MUTANTS).items() if count > 1] == []
    for area, count in Counter(mutant.area for mutant in MUTANTS).items():
        assert count >= LEAST_OF_AN_AREA, area
    touched = {mutant.path.relative_to(SOURCE).parts[0] for mutant in MUTANTS}
    assert {"engine", "cache", "ops", "native", "text", "server", "weights", "spec"} <= touched
    assert {"models", "layers", "client", "reference", "tiny", "cli"} <= touched


def test_every_mutant_has_been_run_and_killed() -> None:
    found = page.outcomes()
    assert found.keys() == {mutant.id for mutant in MUTANTS}, "make mutants OPTIONS=--write-docs"
    alive = [name for name, (outcome, _) in found.items() if outcome not in page.DEAD]
    assert not alive, "a survivor is a defect of the checks"
    assert page.generated(MUTANTS, found) in page.FILE.read_text(), "make mutants writes it"
