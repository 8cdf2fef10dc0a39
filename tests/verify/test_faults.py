"""Every seeded fault turns its check red, and without the fault the check is green."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle import with_oracle
from trueline.verify.cases import CASES, Subject, make_subject
from trueline.verify.checks import CHECKS
from trueline.verify.failed import CheckFailed
from trueline.verify.faults import Fault
from trueline.verify.faults.table import FAULTS
from trueline.verify.rank_ledger import rank_ledger
from trueline.verify.schedules import RANK_CHECKS

PAIRS = sorted({(fault.check, fault.case) for fault in FAULTS})


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    """Made when first asked for, by name."""
    root: Path = tmp_path_factory.mktemp("subjects")
    needs_oracle = {fault.case for fault in FAULTS if fault.check == "oracle"}

    class Subjects(dict[str, Subject]):
        def __missing__(self, name: str) -> Subject:
            subject = make_subject(name, root / name)
            self[name] = with_oracle(subject, root) if name in needs_oracle else subject
            return self[name]

    return Subjects()


# Each takes many seconds where kernels are interpreted.
SELDOM = [
    fault
    for check in ("graph = eager", "masked prefill", "drafts = plain, captured")
    for fault in [each for each in FAULTS if each.check == check][1:]
]
# And some of V4's, each of which runs the engine.
ROUNDED = [each for each in FAULTS if each.check == "published rounding"]
SELDOM += [each for each in FAULTS if each.case.startswith("v4-") and each not in ROUNDED][8:]
SELDOM += ROUNDED[6:]
EACH = [
    pytest.param(fault, id=fault.id, marks=[pytest.mark.slow] if fault in SELDOM else [])
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", EACH)
def test_fault_turns_its_check_red(fault: Fault, subjects: dict[str, Subject]) -> None:
    """By what it computes: a fault that no longer fits the function it replaces raises these, and
    would turn any check red."""
    subject = subjects[fault.case]
    with fault.seeded(), pytest.raises(CheckFailed) as caught:
        CHECKS[fault.check](subject)
    assert not any(f"{name}Error" in str(caught.value) for name in ("Type", "Attribute", "Name"))


ON_RANKS = {**RANK_CHECKS, "rank ledger": rank_ledger}
MORE_RANKS = (4, 8)
"""CHECKS has two."""


@pytest.mark.slow
@pytest.mark.parametrize("size", MORE_RANKS)
@pytest.mark.parametrize(
    "fault", [each for each in FAULTS if each.check in ON_RANKS], ids=lambda fault: fault.id
)
def test_fault_is_red_on_more_ranks(fault: Fault, size: int, subjects: dict[str, Subject]) -> None:
    subject = subjects[fault.case]
    with fault.seeded(), pytest.raises(CheckFailed):
        ON_RANKS[fault.check](subject, size)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_leaves_nothing_behind(fault: Fault) -> None:
    owner = fault.place()
    original = vars(owner)[fault.attribute]
    with fault.seeded():
        assert vars(owner)[fault.attribute] is not original
    assert vars(owner)[fault.attribute] is original


# Seen elsewhere in less time: numbers by test_triton_attention.py; graphs of other models here and
# by test_sparse_engine.py; schedules of V4 by test_compressed.py and test_published_rounding.py, of
# latents in fp8 by test_fp8_latents.py.
ELSEWHERE = [
    *(pair for pair in PAIRS if pair[0] == "any heads"),
    ("graph = eager", "v3-shallow"),
    ("graph = eager", "v32-shallow"),
    ("graph = eager, compressed", "v4-shallow"),
    ("drafts = plain, captured", "v32-shallow"),
    ("engine oracle", "v4-small"),
    ("prefix = cold", "v4-small"),
    ("published rounding, bitwise", "v4-rounded"),
    ("fp8 latents, bitwise", "v3-fp8-cache"),
]
GREEN = [
    pytest.param(*pair, marks=[pytest.mark.slow] if pair in ELSEWHERE else []) for pair in PAIRS
]


# After the faults, so that in most orders a fault that stayed behind in a cache would show.
@pytest.mark.parametrize(("check", "case"), GREEN, ids=lambda value: value)
def test_check_is_green(check: str, case: str, subjects: dict[str, Subject]) -> None:
    CHECKS[check](subjects[case])


@pytest.mark.slow
@pytest.mark.parametrize("size", MORE_RANKS)
@pytest.mark.parametrize(
    ("check", "case"), [pair for pair in PAIRS if pair[0] in ON_RANKS], ids=lambda value: value
)
def test_check_is_green_on_more_ranks(
    check: str, case: str, size: int, subjects: dict[str, Subject]
) -> None:
    ON_RANKS[check](subjects[case], size)


def test_the_table_is_sound() -> None:
    ids = [fault.id for fault in FAULTS]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= 25
    assert {fault.case for fault in FAULTS} <= CASES.keys()
    # a check that no fault can turn red would be worthless
    assert {fault.check for fault in FAULTS} == set(CHECKS)


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_one_spec_and_a_balanced_ledger(
    name: str, subjects: dict[str, Subject]
) -> None:
    CHECKS["one-spec"](subjects[name])
    CHECKS["ledger"](subjects[name])
    CHECKS["absorbed = expanded"](subjects[name])
