"""Known bugs, put into the running package one at a time: which of them a user's run would have
caught, by which check, and in which layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.errors import TruelineError, UsageError, described, did_you_mean
from trueline.ops.registry import OPS
from trueline.verify.checks import NEEDS
from trueline.verify.faults import Fault
from trueline.verify.faults.table import FAULTS
from trueline.verify.report import Check, FaultRow, Status
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Tier
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.outcome import carry_out
from trueline.verify.suite.run import all_checks
from trueline.verify.suite.session import Session

# Cheapest first, and what tells most: a fault is reported by the first check that it turns red.
ORDER = (
    *("preflight", "layers", "definition", "modes", "logits", "weights", "caches", "ops"),
    *("answers", "variants", "options"),
)
Logits = list[dict[int, Tensor]]


def named_faults(ids: Sequence[str]) -> list[Fault]:
    """All of the table without ids."""
    by_id = {fault.id: fault for fault in FAULTS}
    for name in ids:
        if name not in by_id:
            raise UsageError(f"no fault is called {name}{did_you_mean(name, by_id)}")
    return [by_id[name] for name in ids] or list(FAULTS)


@dataclass(frozen=True)
class Patient:
    """The model that faults are put into."""

    name: str
    model: Path
    config: EngineConfig
    tier: Tier = "standard"

    def session(self) -> Session:
        return Session(self.name, self.model, self.config)

    def healthy(self) -> Logits:
        """What the engine computes without a fault."""
        return _logits(self.session())


def fault_rows(
    patient: Patient,
    faults: Sequence[Fault],
    progress: Callable[[str, int, int], None] = lambda fault, done, total: None,
) -> Iterator[FaultRow]:
    healthy = patient.healthy()
    for number, fault in enumerate(faults):
        progress(fault.id, number, len(faults))
        yield one_fault(patient, fault, healthy)


def one_fault(patient: Patient, fault: Fault, healthy: Logits) -> FaultRow:
    row = FaultRow(id=fault.id, what=fault.what, outcome="not here")
    try:
        fault.place()
    except Exception as error:
        return _changed(row, evidence=f"what it replaces is not here: {described(error)}")
    with fault.seeded():
        try:
            session = patient.session()
        except TruelineError as error:
            return _changed(
                row, outcome="caught", caught_by="start", invariant="ledger", evidence=str(error)
            )
        except Exception as error:
            return _changed(
                row, outcome="caught", caught_by="start", invariant="start",
                evidence=described(error),
            )  # fmt: skip
        red = first_red(Numbers(session), patient.tier, _ops_of(fault))
        if red is not None:
            return _changed(
                row,
                outcome="caught",
                caught_by=red.id,
                invariant=red.invariant,
                layer=wrong_layer(red),
                position=red.place.position if red.place else None,
                evidence=red.evidence,
            )
        changed = True
        with suppress(TruelineError):
            changed = not _same(_logits(session), healthy)
    if changed:
        return _changed(row, outcome="survived", evidence="logits changed, and no check failed")
    if fault.check in NEEDS and not session.plan.device.is_gpu:
        return _changed(row, outcome="not met", evidence=NEEDS[fault.check])
    return _changed(
        row,
        outcome="no effect",
        evidence=f"this model's logits are the same; seen by {fault.check}",
    )


def first_red(measured: Numbers, tier: Tier, concerned: set[str] | None) -> Check | None:
    """The check that fails first, cheapest first. `concerned`: ops that are checked alone; None:
    all of them."""
    todos = sorted(
        all_checks(measured, tier), key=lambda todo: ORDER.index(todo.id.partition("/")[0])
    )
    for todo in todos:
        group, _, name = todo.id.partition("/")
        if group == "ops" and concerned is not None and name.partition("=")[0] not in concerned:
            continue
        check = carry_out(todo)
        if check.status in (Status.FAILED, Status.ERROR):
            return check
    return None


def _ops_of(fault: Fault) -> set[str] | None:
    """Ops that the fault may break when they are checked alone; None: any."""
    owner = fault.place()
    module = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", ""))
    if not module.startswith("trueline."):
        return None
    room, _, rest = module.removeprefix("trueline.").partition(".")
    op = rest.partition(".")[0]
    if room != "ops":
        return set()
    return {op} if op in OPS else None


def wrong_layer(check: Check) -> str:
    """The first, "all" or "none"."""
    if "wrong in all layers" in check.evidence:
        return "all"
    return "none" if check.place is None or check.place.layer is None else str(check.place.layer)


def _logits(session: Session) -> Logits:
    first = next(iter(compositions.compositions(session)))
    return compositions.run(session, first).done.logits


def _same(one: Logits, two: Logits) -> bool:
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[p], b[p]) for p in a)
        for a, b in zip(one, two, strict=True)
    )


def _changed(row: FaultRow, **changes: object) -> FaultRow:
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return FaultRow(**{**fields, **changes})
