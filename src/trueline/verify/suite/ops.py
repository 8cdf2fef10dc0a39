"""Every implementation of an op that the model needs: the plan's choice, and what else runs here,
against float64 on data that hides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature

import torch

from trueline.ops.capabilities import Context
from trueline.ops.linear import LIBRARIES
from trueline.ops.registry import OPS, capabilities, implementation, refusals
from trueline.plan.select import op_refusals
from trueline.verify.ops import FP8_CHECKS, OP_CHECKS, OpCheck
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.outcome import Outcome, Todo
from trueline.verify.suite.session import Session
from trueline.weights.formats.dense import DENSE


def checks(session: Session) -> Iterator[Todo]:
    plan = session.plan
    needed = {op for op in plan.selections if op in OP_CHECKS}
    for op in sorted(needed):
        chosen = {plan.selections[op].name}
        chosen |= {form[op].name for form in plan.by_format.values() if op in form}
        for name in dict.fromkeys([*sorted(chosen), *OPS[op]]):
            if name == "reference" or (name not in chosen and not runs_here(session, op, name)):
                continue
            for check in _checks_of(session, op, name):
                which = "chosen by the plan" if name in chosen else "an alternative that runs here"
                yield Todo(
                    f"ops/{op}={name}, {check.what}",
                    "op = reference",
                    f"{op}={name} ({which}) against float64: {check.what}",
                    lambda op=op, name=name, check=check: _run(  # type: ignore[misc]
                        session, op, name, check
                    ),
                )


def _run(session: Session, op: str, name: str, check: OpCheck) -> Outcome:
    plan = session.plan
    if reasons := left_to_a_library(op, name, check):
        raise NotForced(f"batch-invariant mode refuses it on this machine: {'; '.join(reasons)}")
    return run_check(op, name, check, plan.device.torch, plan.compute_dtype)


def left_to_a_library(op: str, name: str, check: OpCheck) -> list[str]:
    """Why the plan would refuse it here in batch-invariant mode, where that is not our doing."""
    if op != "linear" or name not in LIBRARIES or not check.invariant:
        return []
    return op_refusals(op, name, Context(dtype=torch.float32, batch_invariant=True))


def runs_here(session: Session, op: str, name: str) -> bool:
    """Whether the plan could take it for some of the model's weights."""
    declared = capabilities(op, name)
    stored = (DENSE.label, *session.plan.by_format)
    packs = any(not declared.not_packed(form) for form in stored)
    return packs and not refusals(op, name, context_of(session))


def context_of(session: Session) -> Context:
    plan = session.plan
    return Context(
        dtype=plan.compute_dtype,
        device=plan.device.torch.type,
        compute_capability=plan.device.compute_capability,
    )


def _checks_of(session: Session, op: str, name: str) -> Iterator[OpCheck]:
    declared, context = capabilities(op, name), context_of(session)
    wanted = [check for check in OP_CHECKS[op] if check.fits(declared)]
    if "activations" in declared.numerics:
        wanted += FP8_CHECKS.get(op, ())
    for check in wanted:
        may = declared.batch_invariant or not check.invariant
        if may and not check.refused(declared, context):
            yield check


def names_in(check: str) -> tuple[str, str, str]:
    """Op, implementation and what is checked, of a check's id."""
    op, _, rest = check.removeprefix("ops/").partition("=")
    name, _, what = rest.partition(", ")
    return op, name, what


def named_check(op: str, what: str) -> OpCheck | None:
    every = (*OP_CHECKS.get(op, ()), *FP8_CHECKS.get(op, ()))
    return next((check for check in every if check.what == what), None)


def run_check(
    op: str, name: str, check: OpCheck, device: torch.device, dtype: torch.dtype
) -> Outcome:
    takes_dtype = "dtype" in signature(check.run).parameters
    with device, torch.no_grad():
        if takes_dtype and dtype != torch.float32:
            check.run(implementation(op, name), dtype)
        else:
            check.run(implementation(op, name))
    ran = str(dtype if takes_dtype else torch.float32).removeprefix("torch.")
    return Outcome(f"in {ran} on {device.type}", ran={op: name})
