"""Tiny models that mutants meet as a user's model would, and the run of verify on them. In a child:
what is imported of trueline here is the source that the child was given."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.listed import Mutant
from mutants.reach import Reach, Wanted

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Patient:
    name: str
    case: str
    options: Options = field(default_factory=dict)


PATIENTS: Sequence[Patient] = (
    *(Patient(case, case) for case in (
        *("v3-near", "ling", "glm5", "v4-shallow", "v2", "v2-lite", "k25", "glm", "v32-block-1"),
        *("v3-rope-parameters", "tied", "bf16", "fp8-exempt", "int4", "fp4", "v4-fp4"),
        *("v4-base-fp8", "v32-fp8", "ling-bf16", "ling-silu", "v4-odd", "v3-no-yarn-scaling"),
        *("v3-one-head", "v3-ranks", "v4-ranks", "fp8-ranks", "int4-ranks"),
    )),
    Patient("v3, fp8 cache in groups of 8", "v3-near",
            {"kv_cache_dtype": "fp8", "kv_cache_group_size": 8, "kv_cache_scale_fmt": "ue8m0"}),
    Patient("ling, states in 16 bits", "ling-bf16", {"mamba_cache_dtype": "auto"}),
    Patient("v3-one-head, batch-invariant", "v3-one-head", {"batch_invariant": True}),
    Patient("v3, fp8 cache", "v3-near", {"kv_cache_dtype": "fp8"}),
    Patient("fp8, fp8 activations", "fp8-inputs", {"numerics": "activations"}),
    Patient("v4, published numerics", "v4-rounded", {"numerics": "published"}),
    Patient("v3, batch-invariant", "v3-near", {"batch_invariant": True}),
    Patient("glm5, shuffled fp8 keys", "glm5",
            {"index_cache_dtype": "e4m3fn", "index_cache_layout": "shuffled", "block_size": 64}),
    Patient("v4, poison and canaries", "v4-shallow", {"poison": True, "canary_interval": 1}),
)  # fmt: skip
"""Every family; every stored format; options that choose other code. Cheapest first."""
CONCERNED: Mapping[str, str] = {
    "compress|v4|entries|sink|window|hyper|tails|published|row_rounding": "v4",
    "canar|poison": "canaries",
    "lightning|bailing|ling|state|slot|snapshot": "ling",
    "index|sparse|topk|shuffle|planar": "glm5|v32",
    "latent.?fp8|fp8.?latent": "fp8 cache in groups|fp8 cache",
    "replicated|partial|rank|cut": "ranks|one-head",
    "int4": "int4",
    "fp4": "fp4",
    "fp8|pack|formats/|stored|scale|quantised": "fp8|int4|fp4",
}
"""What area, file and name of a mutant tell of the models that it is tried on first."""


def concerned(mutant: Mutant, patients: Sequence[Patient]) -> list[Patient]:
    """Those first that it is about."""
    told = f"{mutant.area} {mutant.file} {mutant.id}"
    names = [name for found, name in CONCERNED.items() if re.search(found, told)]

    def rank(patient: Patient) -> int:
        matches = (i for i, name in enumerate(names) if re.search(name, patient.name))
        return next(matches, len(names))

    return sorted(patients, key=rank)


def make_models(root: Path) -> Callable[[Path], int]:
    def run(place: Path) -> int:
        _as_a_user()
        from trueline.verify.cases import make_subject

        for case in dict.fromkeys(patient.case for patient in PATIENTS):
            if not (root / case).exists():
                make_subject(case, root / f"{case}.part")
                (root / f"{case}.part").rename(root / case)
        return 0

    return run


def healthy(patient: Patient, models: Path, wanted: Wanted, out: Path) -> Callable[[Path], int]:
    """All checks pass without a mutant; notes which of the wanted lines they run."""

    def run(place: Path) -> int:
        _as_a_user()
        began = time.monotonic()
        with Reach(wanted) as reach:
            red = _first_red(patient, models, None)
        found = {"red": red, "seconds": time.monotonic() - began, "reached": reach.found()}
        out.write_text(json.dumps(found))
        return 0

    return run


def examined(
    mutant: Mutant, patients: Sequence[Patient], models: Path, out: Path
) -> Callable[[Path], int]:
    """The first check that fails on one model after the other."""

    def run(place: Path) -> int:
        _as_a_user()
        tried = []
        for patient in patients:
            tried.append(patient.name)
            out.write_text(json.dumps({"tried": tried}))  # should it never end
            red = _first_red(patient, models, _ops_of(mutant))
            if red is not None:
                out.write_text(json.dumps({"tried": tried, "red": red}))
                break
        return 0

    return run


def _as_a_user() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # what tests do, and nobody else
    sys.modules["torch"].set_num_threads(1)


def _first_red(patient: Patient, models: Path, ops: set[str] | None) -> list[str] | None:
    """Invariant and check. Where the model cannot be loaded: "start" and the class of the error."""
    from trueline.config import EngineConfig
    from trueline.verify.cases import CASES
    from trueline.verify.suite.faults import first_red
    from trueline.verify.suite.numbers import Numbers
    from trueline.verify.suite.session import Session

    case = CASES[patient.case]
    options = {"max_num_seqs": 8, **case.options, **patient.options}
    try:
        session = Session(
            patient.name, models / patient.case, EngineConfig(facts=case.facts, **options)
        )
        numbers = Numbers(session)
        red = first_red(numbers, "standard", ops)
    except Exception as error:
        print(repr(error), flush=True)
        return ["start", type(error).__name__]
    if red is None:
        return None
    print(red.id, red.evidence, flush=True)
    return [red.invariant, red.id]


def _ops_of(mutant: Mutant) -> set[str] | None:
    """Those checked alone; None: all. What is outside of the ops is not in their checks."""
    from trueline.ops.registry import OPS

    room, *rest = Path(mutant.file).parts
    if room not in ("ops", "native", "parallel"):
        return set()
    op = rest[0]
    return {op} if op in OPS else None
