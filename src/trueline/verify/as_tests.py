"""What verify/plugin.py runs: the checks of `trueline verify` on a model; and each replacement
alone against its float64 reference, then inside the engine, on tiny models, where every position is
held against the float64 reference of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch

from trueline.cache.kinds.lightning import LightningState
from trueline.config import EngineConfig
from trueline.errors import TruelineError, UsageError
from trueline.llm import engine_config
from trueline.ops.capabilities import PUBLISHED, Capabilities, Context
from trueline.ops.registry import REGISTRY as OPS
from trueline.plan.select import LAYERS
from trueline.plugins import Registry
from trueline.utils.hub import find_model
from trueline.verify.canaries import CANARY_CHECKS
from trueline.verify.cases import Subject, make_subject
from trueline.verify.numerics import NUMERICS_CHECKS, PUBLISHED_CHECKS
from trueline.verify.ops import FP8_CHECKS, OP_CHECKS, OpCheck
from trueline.verify.report import Measure, Status
from trueline.verify.schedules import ENGINE_CHECKS, RANK_CHECKS
from trueline.verify.suite.localise import Failures
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.outcome import Todo, carry_out
from trueline.verify.suite.run import all_checks
from trueline.verify.suite.session import Session

LING = "ling"
CASES = ("v3-near", LING)
ON_RANKS = "ling-ranks"
INVARIANT = (
    "batch-invariant",
    "ranks = one, bitwise",
    "collectives in order",
    "fp8 latents, bitwise",
    "fp8 activations, bitwise",
    "published rounding, bitwise",
)
FP8_CASES = ("fp8-inputs", "fp8-inputs-ue8m0")
ROUNDED = "v4-rounded"
COMPRESSED = ("compressed", "compress", "sink_attention", "hyper_connections")
"""Kinds that DeepSeek-V4 alone has."""


@dataclass(frozen=True)
class Replacement:
    registry: Registry
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.registry.noun} {self.kind}={self.name}"

    @property
    def declared(self) -> Capabilities:
        declared: Capabilities = self.registry.get(self.kind, self.name).capabilities
        return declared

    def load(self, *, invariant: bool) -> object:
        """Skips what it refuses of batch-invariant mode; any other refusal is a failure."""
        found, declared = self.registry.get(self.kind, self.name), self.declared
        context = Context(dtype=torch.float32, numerics=declared.numerics[0])
        refused = declared.refusals(context)
        assert not refused, f"{self} cannot run here: {refused}"
        context = replace(context, batch_invariant=True)
        refused = declared.refusals(context) if invariant else []
        if refused:
            pytest.skip(f"{self} refuses batch-invariant mode: {refused[0]}")
        return found

    def op_checks(self) -> Iterator[OpCheck]:
        yield from (check for check in OP_CHECKS[self.kind] if check.fits(self.declared))
        if "activations" in self.declared.numerics:
            yield from FP8_CHECKS.get(self.kind, ())

    def engine_checks(self) -> Iterator[tuple[str, str]]:
        """With the cases that each runs on."""
        rounds = self.kind == "row_rounding"
        if "weights" in self.declared.numerics and not rounds:
            for check in (*ENGINE_CHECKS, *CANARY_CHECKS):
                yield from ((check, case) for case in self.cases(check))
        if PUBLISHED in self.declared.numerics or rounds:
            yield from ((check, ROUNDED) for check in PUBLISHED_CHECKS)
        if "activations" in self.declared.numerics:
            yield from ((check, case) for check in NUMERICS_CHECKS for case in FP8_CASES)

    def options(self) -> dict[str, dict[str, str]]:
        return {f"{self.registry.noun}s": {self.kind: self.name}}

    def cases(self, check: str) -> tuple[str, ...]:
        """Only Ling has linear layers, and only DeepSeek-V4 compressed ones; ranks need dims that
        they can divide."""
        if self.kind in COMPRESSED:  # its rows in fp8 are no latents
            return () if check.startswith("fp8 latents") else (ROUNDED,)
        if check in RANK_CHECKS:
            return (ON_RANKS,)
        return (LING,) if self.kind in ("lightning", *LightningState.ops) else CASES


def asked_for(config: pytest.Config) -> Iterator[Replacement]:
    for registry in (OPS, LAYERS):
        for text in config.getoption(f"--{registry.noun}"):
            kind, _, name = text.partition("=")
            try:
                registry.check_name(kind, name)
            except UsageError as error:
                raise pytest.UsageError(str(error)) from error
            yield Replacement(registry, kind, name)


@dataclass(frozen=True)
class CheckOfModel:
    """A check of a run, which computes what its compositions need once for all of them."""

    model: str
    todo: Todo
    failures: Failures = field(repr=False)

    def __str__(self) -> str:
        return f"{self.model}: {self.todo.id}"


def checks_of(model: str, config: pytest.Config) -> Iterator[CheckOfModel]:
    try:
        numbers = Numbers(Session(model, find_model(model), _options(config)))
    except TruelineError as error:
        raise pytest.UsageError(f"{model}: {error}") from error
    failures = Failures(numbers, config.getoption("--replay-dir"))
    for todo in all_checks(numbers, config.getoption("--tier")):
        yield CheckOfModel(model, todo, failures)


def _options(config: pytest.Config) -> EngineConfig:
    given: dict[str, Any] = {}
    for text in config.getoption("--option"):
        name, is_given, value = text.partition("=")
        if not is_given:
            raise UsageError(f"--option {text}: accepted: NAME=VALUE, as dtype=bfloat16")
        try:
            given[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            given[name] = value
    for registry in (OPS, LAYERS):
        chosen = {each.kind: each.name for each in asked_for(config) if each.registry is registry}
        if chosen:
            given[f"{registry.noun}s"] = chosen
    return engine_config(given)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    replacements, models = list(asked_for(metafunc.config)), metafunc.config.getoption("--model")
    if not replacements and not models:
        raise pytest.UsageError("give --model MODEL, --op OP=NAME or --layer KIND=NAME")
    name, cases = metafunc.definition.name, list[object]()
    if name == "test_model":
        every = [check for model in models for check in checks_of(model, metafunc.config)]
        metafunc.parametrize("check", [pytest.param(check, id=str(check)) for check in every])
    elif name == "test_against_the_reference":
        cases = [
            pytest.param(each, check, id=f"{each}: {check.what}")
            for each in replacements
            if each.registry is OPS
            for check in each.op_checks()
        ]
        metafunc.parametrize(("replacement", "check"), cases)
    else:
        cases = [
            pytest.param(each, check, case, id=f"{each}: {check} on {case}")
            for each in replacements
            for check, case in each.engine_checks()
        ]
        metafunc.parametrize(("replacement", "check", "case"), cases)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    """Tiny models, each made once."""
    root = tmp_path_factory.mktemp("conformance")
    cases = (*CASES, ON_RANKS, ROUNDED, *FP8_CASES)
    return {case: make_subject(case, root / case) for case in cases}


def test_against_the_reference(replacement: Replacement, check: OpCheck) -> None:
    check.run(replacement.load(invariant=check.invariant))


def test_in_the_engine(
    replacement: Replacement, check: str, case: str, subjects: dict[str, Subject]
) -> None:
    replacement.load(invariant=check in INVARIANT)
    checks = ENGINE_CHECKS | CANARY_CHECKS | NUMERICS_CHECKS | PUBLISHED_CHECKS
    checks[check](replace(subjects[case], options=replacement.options()))


def test_model(check: CheckOfModel, record_property: Callable[[str, object], None]) -> None:
    done = carry_out(check.todo)
    check.failures.explain(done)
    for measure in done.measures:
        record_property(measure.name, _words(measure))
    if done.status == Status.NOT_COVERED:
        pytest.skip(done.evidence)
    record_property("evidence", done.evidence)
    if done.status != Status.PASSED:
        where = f"\nreplay it with: trueline replay {done.replay}" if done.replay else ""
        pytest.fail(f"{done.status}: {done.evidence}{where}", pytrace=False)


def _words(measure: Measure) -> str:
    accepted = "" if measure.gate is None else f", accepted {measure.gate:.3g}"
    return f"{measure.value:.3g}{accepted}"
