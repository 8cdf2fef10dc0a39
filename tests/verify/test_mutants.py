"""The list of `make mutants` fits the source: it cannot rot silently. Running it takes longer. And
what tells which lines a run comes to, for `--verify`."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from itertools import accumulate
from threading import Thread
from typing import Any

import pytest

from mutants import page, user_page
from mutants.listed import SOURCE, TESTS, Mutant, load
from mutants.patients import PATIENTS, concerned
from mutants.reach import Reach, changed_lines

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


# -- what a user's run of verify sees --------------------------------------------------

TEXT = """
LIMIT = 3

def one(x):
    if (
        x > LIMIT
    ):
        return more(
            x
        )
    return 0

class Two:
    size = 4

    def more(self, x):
        for each in range(x):
            x += each
        return x
"""


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("LIMIT = 3", "LIMIT = 4", None),
        ("x > LIMIT", "x >= LIMIT", (5, 7)),
        ("            x\n", "            x + 1\n", (8, 10)),
        ("return 0", "return 1", (11, 11)),
        ("size = 4", "size = 5", None),
        ("            x += each\n", "            x += each\n            x += 1\n", (18, 18)),
        ("            x += each\n", "            pass\n", (18, 18)),
        ("def more(self, x)", "def more(self, x=1)", None),
    ],
)
def test_the_statement_that_a_mutant_changes(
    old: str, new: str, lines: tuple[int, int] | None
) -> None:
    assert changed_lines(TEXT, TEXT.replace(old, new)) == lines


def test_what_never_ran_is_not_reached() -> None:
    """Taken branches only; in threads too; what is outside of functions by the file's functions."""
    lines = {"taken": (8, 10), "other": (11, 11), "loop": (18, 18), "outside": None}
    names: dict[str, Any] = {"more": lambda x: x}
    for file in ("engine/some.py", "engine/idle.py"):
        exec(compile(TEXT, f"/a/trueline/{file}", "exec"), names)
    reach = Reach({"engine/idle.py": lines | {"idle": (11, 11)}})
    with reach:
        names["one"](5)
    assert reach.found() == ["outside", "taken"]
    with reach:
        thread = Thread(target=names["Two"]().more, args=(0,))
        thread.start()
        thread.join()
        assert reach.found() == ["outside", "taken"], "the loop has no turns"
        thread = Thread(target=names["Two"]().more, args=(2,))
        thread.start()
        thread.join()
    assert reach.found() == ["loop", "outside", "taken"]
    idle = Reach({"engine/some.py": {"outside": None}})
    with idle:
        names["one"](5)
    assert idle.found() == [], "another file's functions"


def test_models_that_a_mutant_is_about_come_first() -> None:
    first = {m.id: concerned(m, PATIENTS)[0].name for m in MUTANTS if user_page.is_in_reach(m)}
    assert first["window-without-its-oldest"].startswith("v4")
    assert first["state-copy-forgets-values"].startswith("ling")
    assert first["int4-group-at-the-end-lost"] == "int4"
    assert first["pool-register-moves-the-hash"] == PATIENTS[0].name
    assert {patient.name for patient in concerned(MUTANTS[0], PATIENTS)} == {
        patient.name for patient in PATIENTS
    }


def test_the_page_of_user_runs_counts_its_rows() -> None:
    rows = user_page.read()
    assert f"{user_page.counted(row.outcome for row in rows.values())}." in (
        user_page.FILE.read_text()
    )
    assert len(rows) >= LEAST
    for row in rows.values():
        seen, survived = row.outcome in user_page.SEEN, row.outcome == user_page.SURVIVED
        assert bool(row.models) == (seen or survived)
        assert bool(row.check) == seen or row.outcome == user_page.HANGS
