"""`trueline verify` on tiny models: it passes, it sees errors a little larger than noise, it says
where, and what it could not force is never "passed"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.graphs import DecodeGraphs
from trueline.errors import UsageError
from trueline.reference import ENDS
from trueline.verify.cases import Subject
from trueline.verify.engine import EngineRun
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import emulated
from trueline.verify.report import Check, Report, Status
from trueline.verify.suite import captured, choices, compositions
from trueline.verify.suite import estimate as estimates
from trueline.verify.suite.choices import Scores
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.estimate import Pace, estimate, measure
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.judge import Judge
from trueline.verify.suite.judgement import (
    Judgement,
    Requests,
)
from trueline.verify.suite.numbers import ENGINE_PARTS, Numbers
from trueline.verify.suite.observe import Observed
from trueline.verify.suite.run import Selection, all_checks, tier_compositions, verify
from trueline.verify.suite.session import Session
from verified import made

SMOKE = Selection(tier="smoke")
# One of each kind of attention; what is stored in fewer bits.
QUICK = ("v3-near", "ling", "glm5", "v4-shallow", "fp8")
OTHERS = (
    *("v2", "v2-lite", "k2", "k25", "glm", "v32", "v32-block-1", "v4-flat", "v4-small", "v4-odd"),
    *("tied", "int4", "k25-int4", "fp4", "bf16", "ling-bf16", "glm5-bf16", "ling-fp8", "v32-fp8"),
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    model, config = made("v3-near", tmp_path_factory.mktemp("suite"))
    return Session("v3-near", model, config)


@pytest.fixture(scope="module")
def numbers(session: Session) -> Numbers:
    measured = Numbers(session)
    measured.run(next(iter(compositions.compositions(session))))
    return measured


def wrong(report: Report) -> list[tuple[str, str]]:
    return [(check.id, check.evidence) for check in report.failed]


@pytest.mark.parametrize("name", QUICK)
def test_smoke_passes(name: str, tmp_path: Path) -> None:
    model, config = made(name, tmp_path)
    report = verify(model, config, SMOKE)
    assert not wrong(report)
    assert report.passed
    groups = {check.group for check in report.checks if check.status == Status.PASSED}
    assert groups - {"weights"} == {
        *("preflight", "layers", "definition", "logits", "modes", "options")
    }
    assert ("weights" in groups) == (name == "fp8")
    worst = {m.name: m for m in _check(report, "layers/each half").measures}
    assert {"entry", "mixer", "feed forward", "head"} <= worst.keys()
    assert all(0 < m.value < m.gate for m in worst.values() if m.gate)


def test_a_layer_judged_alone_takes_the_choice_of_one_before(tmp_path: Path) -> None:
    """glm5: layers that select no keys of their own."""
    model, config = made("glm5", tmp_path)
    session = Session("glm5", model, config)
    numbers = Numbers(session)
    first = next(iter(compositions.compositions(session)))
    together = numbers.run(first).only(*ENGINE_PARTS).offs
    ran = numbers.ran[first.name].requests
    for layer in range(session.definition.num_layers):
        alone = numbers.judge.judge([ran], [], numbers.bands, [layer]).offs
        wanted = [off for off in together if off.layer in (layer, session.definition.num_layers)]
        assert [(off.layer, off.part) for off in alone] == [(off.layer, off.part) for off in wanted]
        assert all(torch.equal(a.values, b.values) for a, b in zip(alone, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_standard_passes(name: str, tmp_path: Path) -> None:
    model, config = made(name, tmp_path)
    report = verify(model, config)
    assert not wrong(report)
    assert report.power
    assert all(row.smallest is not None and row.smallest <= 2**-8 for row in report.power)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v3-near", "ling", "v32-near"])
@pytest.mark.parametrize(
    "options",
    [{"batch_invariant": True}, {"block_size": 1}, {"block_size": 3}, {"dtype": "bfloat16"},
     {"mamba_cache_dtype": "float32"}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}],
    ids=str,
)  # fmt: skip
def test_engine_options(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, config = made(name, tmp_path, **options)
    assert not wrong(verify(model, config, with_power=False))


def test_what_cannot_be_forced_is_not_covered(tmp_path: Path) -> None:
    """Ranks that do not divide the model; a run in which nothing passed has not passed."""
    model, config = made("v3-near", tmp_path)
    report = verify(model, config, Selection(only=("modes/4 ranks*", "modes/2 ranks*")))
    assert {check.status for check in report.checks} == {Status.NOT_COVERED}
    assert all("divid" in check.evidence for check in report.checks)
    assert not report.passed, "nothing ran"


@pytest.mark.parametrize("case", ["fp8", "ling", "v4-shallow"])
def test_engines_begin_with_what_others_left(case: str, tmp_path: Path) -> None:
    """Numbers, the same in every run, where fresh memory may be zeros; in null places too."""
    model, config = made(case, tmp_path)
    session, found = Session(case, model, config), []
    for _ in range(2):
        with session.core() as core:
            caches = local_runner(core.executor).caches
            stores = {**caches.paged, **caches.slotted}.values()
            parts = [part for store in stores for part in store.parts() if not part.constant]
            found.append([part.words[:, :2].clone() for part in parts])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
        assert float((one != 0).double().mean()) > 0.5


def test_selection() -> None:
    with pytest.raises(UsageError, match="tier"):
        Selection(tier="quick")  # type: ignore[arg-type]


def test_unknown_checks_are_refused(tmp_path: Path) -> None:
    model, config = made("v3-near", tmp_path)
    for given in ({"only": ("mode",)}, {"skip": ("ops/nothing",)}):
        with pytest.raises(UsageError, match=r"no such check.*preflight.*solo = batch"):
            verify(model, config, Selection(tier="smoke", **given))


def _check(report: Report, name: str) -> Check:
    return next(check for check in report.checks if check.id == name)


# -- judging ---------------------------------------------------------------------------


def test_large_models_are_judged_in_one_pass(numbers: Numbers) -> None:
    """The same figures, with one layer of the definition in memory at a time."""
    session = numbers.session
    some = list(compositions.compositions(session))[:3]
    apart = {each.name: numbers.run(each) for each in some}
    once = Numbers(session, together=some)
    session.definition.room = 0
    session.definition._parts.clear()
    try:
        for each in some:
            found = once.run(each)
            for off in found.offs:
                assert found.worst(off.layer, off.part) == apart[each.name].worst(
                    off.layer, off.part
                )
            assert found.bands == apart[each.name].bands
        assert len({part for part, _ in session.definition._parts}) == 2
    finally:
        session.definition.room = None


def test_layers_are_kept_as_far_as_there_is_room(session: Session) -> None:
    definition = session.definition
    definition._parts.clear()
    try:
        definition.room = 0
        definition.part(0)
        size = sum(each.nbytes for each in definition.part(1).params.values())
        assert [part for part, _ in definition._parts] == [1]
        definition.room = size
        for layer in (2, ENDS, 1, 2):
            definition.part(layer)
        assert [part for part, _ in definition._parts] == [2, ENDS, 1]
    finally:
        definition.room = None


def test_a_run_is_estimated(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """More checks are expected to take longer; the composition that was timed is not run again."""
    tier = tier_compositions(session, "standard")

    def paced(measured: Numbers, first: Composition) -> Pace:
        pace = measure(measured, first)
        assert pace is not None
        return replace(pace, step=0.1, read=0.1, layer=0.1, head=0.1)

    monkeypatch.setattr(estimates, "measure", paced)
    found = {}
    for name in ("layers", "modes", "ops", "preflight", "*"):
        measured = Numbers(session)
        todos = [
            each for each in all_checks(measured, "standard")
            if Selection(only=(name,)).takes(each)
        ]  # fmt: skip
        made = estimate(measured, todos, tier, with_power=name == "*")
        assert made is not None
        assert set(measured.ran) == ({"whole prompt"} if made.engine else set())
        found[name] = made
    assert found["preflight"].total == 0
    assert found["ops"].total == found["ops"].ops > 0
    assert found["*"].power > 0
    assert 0 < found["layers"].total < found["modes"].total < found["*"].total
    assert str(found["layers"]).startswith("about ")


def test_a_head_is_counted_once_and_not_with_every_layer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of our own. What is slow the first time only is in neither figure."""
    measured, tier = Numbers(session), tier_compositions(session, "smoke")
    now, begun = 0.0, set[str]()

    def take(seconds: float, what: str) -> None:
        nonlocal now
        now += seconds if what in begun else 1000 * seconds
        begun.add(what)

    def judge(given: Any, baseline: Any, bands: Any, layers: Sequence[int]) -> Judgement:
        take(9.0, "head")
        for layer in layers:
            take(2.0, f"layer {layer}")
        return Judgement()

    def part(layer: int, dtype: torch.dtype) -> None:
        nonlocal now
        now += 3.0

    monkeypatch.setattr(measured.judge, "judge", judge)
    monkeypatch.setattr(session.definition, "part", part)
    pace = measure(measured, tier[0], lambda: now)
    assert pace is not None
    assert (pace.read, pace.layer, pace.head) == (6.0, 2.0, 9.0)
    asked = len(tier[0].asks[0].prompt) + tier[0].asks[0].max_tokens
    step = replace(pace, step=0.0, tokens=asked)
    monkeypatch.setattr(estimates, "measure", lambda *given: step)
    layers = [todo for todo in all_checks(measured, "smoke") if todo.id.startswith("layers/")]
    made = estimate(measured, layers, tier, with_power=False)
    evaluations = estimates.NOISE + 1
    count = session.definition.num_layers
    assert made == estimates.Estimate(definition=count * 6.0 + (count * 2.0 + 9.0) * evaluations)


def test_what_cannot_be_timed_is_not_estimated(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, tier = Numbers(session), tier_compositions(session, "smoke")
    todos = list(all_checks(measured, "smoke"))
    monkeypatch.setattr(compositions, "run", lambda *given: 1 / 0)
    assert estimate(measured, todos, tier, with_power=False) is None
    assert isinstance(measured.refused["whole prompt"], ZeroDivisionError)


# -- choices ---------------------------------------------------------------------------


def test_wrong_choices() -> None:
    values = torch.tensor([[5.0, 4.0, 3.0, 3.0 - 1e-9, 1.0]], dtype=torch.float64)
    scores = Scores(values, values.amax(-1))
    for ids, right in (
        ([0, 1, 2], True),
        ([2, 0, 1], True),
        ([0, 1, 3], True),  # a tie, as far as noise goes
        ([0, 1, 4], False),
        ([1, 2, 3], False),
    ):
        off = choices.wrong_choice(scores, torch.tensor([ids]), 1e-7)
        assert bool(off <= 0) == right, ids
    assert not choices.counts_are_right(torch.tensor([[1, 1, 2]]), 3)
    assert not choices.counts_are_right(torch.tensor([[1, -1, 2]]), 3)
    assert choices.counts_are_right(torch.tensor([[1, -1, 2]]), 2)


def test_experts_of_a_group_that_is_not_kept() -> None:
    values = torch.tensor([[9.0, 1.0, 5.0, 4.9]], dtype=torch.float64)
    groups = torch.tensor([[10.0, 9.9]], dtype=torch.float64)
    scores = Scores(values, values.amax(-1), groups, kept=1)
    assert choices.wrong_choice(scores, torch.tensor([[0, 1]]), 1e-7) <= 0
    assert choices.wrong_choice(scores, torch.tensor([[0, 2]]), 1e-7) > 0
    near = replace(scores, groups=torch.tensor([[10.0, 10.0 - 1e-8]], dtype=torch.float64))
    assert choices.wrong_choice(near, torch.tensor([[2, 3]]), 1e-7) <= 0


def test_positions_that_choose_nothing_see_all() -> None:
    rows = choices.all_visible(5, 3, 1, {3: torch.tensor([0, 3, 1]), 4: torch.tensor([4, 0, 2])})
    assert rows.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 3, 1], [4, 0, 2]]
    assert choices.all_visible(5, 3, 2, {}).tolist() == [
        [-1, -1, -1], [0, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, -1]
    ]  # fmt: skip


# -- parts -----------------------------------------------------------------------------


def test_cached_positions_need_somebody_with_the_same_tokens() -> None:
    one, two = Observed(tokens=[1, 2, 3]), Observed(tokens=[1, 5, 3])
    for p in range(3):
        one.paths[p] = "prefill"
    two.take_from(one)
    assert two.paths == {0: "prefill"}
    assert two.reused == {0}
    assert two.computed == []


def test_missing_positions_fail(session: Session) -> None:
    from trueline.verify.suite.observe import Watch

    with session.core() as core:
        watch = Watch(core, 1)
        watch.close()
    watch.requests[0].paths = {0: "prefill", 2: "prefill"}
    done = EngineRun([[]], [{}], [0], [[]], core)
    with pytest.raises(CheckFailed, match="position 1"):
        watch.finish([[1, 2, 3]], done)


def test_modes_prove_that_they_happened(session: Session) -> None:
    """With requests that do not force it, a composition says so."""
    for composition in compositions.compositions(session):
        if composition.name in ("preempt and resume", "prefix hit", "one-token tail"):
            plain = replace(
                composition,
                asks=[replace(composition.asks[0], prompt=[1, 2, 3], max_tokens=2)],
                changes={},
            )
            with pytest.raises(NotForced):
                plain.forced(compositions.run(session, plain))


def test_bits_under_another_schedule(session: Session) -> None:
    first = next(iter(compositions.compositions(session)))
    ran = compositions.run(session, first)
    compositions.require_same_bits("x", ran.done, compositions.run(session, first).done)
    rows = dict(ran.done.logits[0])
    last = max(rows)
    rows[last] = rows[last].nextafter(torch.tensor(torch.inf))
    other = replace(ran.done, logits=[rows])
    with pytest.raises(CheckFailed, match="bits differ"):
        compositions.require_same_bits("x", ran.done, other)


def test_the_definition_of_one_layer_is_that_of_the_whole(session: Session) -> None:
    judge = Judge(session.definition, torch.float32)
    first = next(iter(compositions.compositions(session)))
    ran = compositions.run(session, first)
    whole = judge.judge([ran.requests], [Requests("x", ran.requests.observed)])
    some = judge.judge([ran.requests], [], whole, layers=[1])
    parts = {(off.layer, off.part) for off in some.offs}
    assert {layer for layer, _ in parts} == {1, session.definition.num_layers}
    for layer, part in parts:
        assert some.worst(layer, part) == whole.worst(layer, part)


# -- captured steps --------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [False, True])
def test_captured_steps(
    wrong: bool, numbers: Numbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated: a step is run again instead of being replayed. A graph whose rows are swapped."""
    session = numbers.session
    found = list(compositions.compositions(session))
    composition = next(each for each in found if each.captured)
    few = [replace(ask, max_tokens=5) for ask in composition.asks]  # kernels are interpreted
    composition = replace(composition, asks=few)
    with pytest.raises(NotForced, match="a CPU has none"):
        captured.check(numbers, composition)
    subject = Subject("v3-near", session.model, torch.empty(0), torch.empty(0))
    eager = session.core

    @contextmanager
    def core(**changes: Any) -> Iterator[EngineCore]:
        if changes.get("enforce_eager", True):
            with eager(**changes) as made:
                yield made
            return
        made = emulated(subject, session.engine_config(max_num_seqs=2))
        yield made
        made.close()

    monkeypatch.setattr(session, "core", core)
    monkeypatch.setattr(session, "plan", replace(session.plan, graphs=True))
    if wrong:
        monkeypatch.setattr(captured, "watched", _swapping)
        with pytest.raises(CheckFailed, match="graph = eager: logits, request"):
            captured.check(numbers, composition)
    else:
        outcome = captured.check(numbers, composition)
        assert "2 rows in a graph for 2" in outcome.evidence
        assert outcome.measures[0].good


def _swapping(graphs: DecodeGraphs, seen: set[str]) -> Callable[..., Any]:
    plain = graphs.run

    def run(*given: Any) -> Any:
        made = plain(*given)
        seen.add("swapped")
        return replace(made, hidden=made.hidden.flip(0))

    return run
