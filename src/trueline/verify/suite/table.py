"""Every seeded fault, put into the tiny model it was made for: what a run of `trueline verify` says
of it there. The table in docs/verify-faults.md.

    python -m trueline.verify.suite.table docs/verify-faults.md            # write it: half an hour
    python -m trueline.verify.suite.table docs/verify-faults.md --check    # compare instead
    … --only ID [ID …]                                                     # some of it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trueline.config import EngineConfig
from trueline.verify.cases import CASES, make_subject
from trueline.verify.faults import Fault
from trueline.verify.report import FaultRow
from trueline.verify.suite.faults import Logits, Patient, named_faults, one_fault

Row = tuple[str, ...]
COLUMNS = ("fault", "model", "outcome", "invariant", "check", "first wrong layer")
HEAD = """# What a run of verify sees of known bugs

Each of the [seeded faults](faults.md) in the tiny model that it was made for, and what
`trueline verify` says of it there, on a CPU with the options that the fault needs: the first check
that fails, and the first wrong layer (*all*: every layer; *none*: the check is not about layers).
*Not met*: no run on a CPU comes to what it breaks; [faults.md](faults.md) names the check of ours
that does. *No effect*: the logits of this model are the same with the fault.

Written by `python -m trueline.verify.suite.table docs/verify-faults.md`; `make test-full` compares
every row, `make test` some.

"""


class Patients(dict[str, tuple[Patient, Logits]]):
    """Tiny models by case, made when first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, case: str) -> tuple[Patient, Logits]:
        given = CASES[case]
        model = make_subject(case, self.root / case).model
        options = {"max_num_seqs": 8, **given.options}
        patient = Patient(case, model, EngineConfig(facts=given.facts, **options))
        self[case] = patient, patient.healthy()
        return self[case]


def row_of(fault: Fault, patients: Patients) -> FaultRow:
    patient, healthy = patients[fault.case]
    return one_fault(patient, fault, healthy)


def cells(fault: Fault, row: FaultRow) -> Row:
    """Of the table: what does not depend on a machine's rounding."""
    outcome = f"not met: {row.evidence}" if row.outcome == "not met" else row.outcome
    return (
        f"`{fault.id}`", fault.case, outcome, row.invariant or "",
        (row.caught_by or "").partition("/")[0], row.layer if row.outcome == "caught" else "",
    )  # fmt: skip


def rows(faults: Sequence[Fault]) -> Iterator[tuple[Fault, FaultRow]]:
    with tempfile.TemporaryDirectory() as root:
        patients = Patients(Path(root))
        for number, fault in enumerate(faults):
            print(f"{number + 1}/{len(faults)} {fault.id}", file=sys.stderr, flush=True)
            yield fault, row_of(fault, patients)


def page(table: Sequence[Row]) -> str:
    counts = Counter(row[2] for row in table)
    total = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lines = [f"{len(table)} faults: {total}.", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    return HEAD + "\n".join([*lines, *map(_line, table)]) + "\n"


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def read(file: Path) -> Mapping[str, Row]:
    """By id."""
    found: dict[str, Row] = {}
    for line in file.read_text().splitlines():
        if line.startswith("| `"):
            row = tuple(cell.strip() for cell in line.strip("|").split("|"))
            found[row[0].strip("`")] = row
    return found


def differences(faults: Sequence[Fault], file: Path) -> Iterator[str]:
    written = read(file)
    for fault, row in rows(faults):
        ours, theirs = cells(fault, row), written.get(fault.id)
        if ours != theirs:
            yield f"{fault.id}: {ours}, the table has {theirs}; {row.evidence}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", default=())
    given = parser.parse_args()
    faults = named_faults(given.only)
    if given.check:
        found = list(differences(faults, given.file))
        print("\n".join(found) or f"{len(faults)} rows are as written")
        return int(bool(found))
    table = dict(read(given.file)) if given.file.exists() else {}
    table |= {fault.id: cells(fault, row) for fault, row in rows(faults)}
    given.file.write_text(page([table[f.id] for f in named_faults(()) if f.id in table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
