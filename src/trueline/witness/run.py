"""What `trueline witness` measures: each model right, alone and in a mixed batch, and with the
faults of its stories switched on in the running engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from trueline.device import find_device
from trueline.errors import EngineBroken, described
from trueline.evaluate.statistics import mcnemar
from trueline.llm import LLMEngine
from trueline.tasks.stories import ARITHMETIC, Problem, problems
from trueline.utils.builtin import BuiltinModel
from trueline.utils.json_types import JSON
from trueline.witness.measure import BATCH, Answers, ask_alone, ask_together
from trueline.witness.stories import STORY_FAULTS, UNSEEN, StoryFault, switched_on

ProblemSet = Literal["arithmetic", "long"]
SETS: tuple[ProblemSet, ...] = get_args(ProblemSet)


class Share(TypedDict):
    """Of right answers."""

    right: int
    items: int
    accuracy: float
    interval: tuple[float, float]
    """95 %."""


class RightFigures(TypedDict):
    """Of one set, without a fault. Alone, every second problem is asked: the last two figures are
    of those."""

    alone: Share
    batch: Share
    answers_differ: int
    """Between the two, in their text."""
    p: float
    """McNemar's exact test of the two."""


class FaultFigures(TypedDict):
    story: int
    what: str
    faults: list[str]
    historical: bool
    emulated: bool
    options: JSON
    not_covered: str | None
    """Why there are no figures."""
    right: dict[ProblemSet, Share]
    """In the batch, with the same options and without the fault."""
    with_fault: dict[ProblemSet, Share]
    with_fault_alone: dict[ProblemSet, Share]
    """Only of faults that act in mixed batches alone, and of every second problem."""
    calls: dict[str, int]
    """Of what the fault has replaced."""
    answers_changed: int
    """By the fault, in their text."""
    acted: bool
    """What was replaced ran, and logprobs changed; those of a historical form changed answers."""
    stopped: str | None
    """The engine's last words, where the fault has stopped it: then all answers are wrong."""


class ModelFigures(TypedDict):
    model: str
    stands_for: str
    family: str
    right: dict[ProblemSet, RightFigures]
    faults: list[FaultFigures]


class UnseenFault(TypedDict):
    story: int
    model: str
    what: str
    fault: str
    check: str


class WitnessFigures(TypedDict):
    device: str
    batch: int
    batch_invariant: bool
    models: list[ModelFigures]
    unseen: list[UnseenFault]


@dataclass(frozen=True)
class ProblemSets:
    """All that is asked of a model, both sets in one list."""

    problems: tuple[Problem, ...]
    num_arithmetic: int

    @classmethod
    def draw(cls, arithmetic: int, long: int) -> ProblemSets:
        """Held out from training; arithmetic of 2 to 5 operations in equal shares."""
        kinds = len(ARITHMETIC)
        found = [
            problem
            for place, name in enumerate(ARITHMETIC)
            for problem in problems(name, "test", (arithmetic + kinds - 1 - place) // kinds)
        ]
        return cls((*found, *problems("long", "test", long)), len(found))

    def split(self, answers: Answers) -> dict[ProblemSet, Answers]:
        """By set; a set without problems is left out."""
        arithmetic, count = self.num_arithmetic, len(self.problems)
        places: dict[ProblemSet, range] = {
            "arithmetic": range(arithmetic),
            "long": range(arithmetic, count),
        }
        return {name: answers.of(each) for name, each in places.items() if each}

    def places_alone(self) -> list[int]:
        """Every second problem of each set: to ask one at a time takes longest."""
        arithmetic, count = self.num_arithmetic, len(self.problems)
        return [*range(0, arithmetic, 2), *range(arithmetic, count, 2)]

    def only(self, places: Sequence[int]) -> ProblemSets:
        arithmetic = sum(place < self.num_arithmetic for place in places)
        return ProblemSets(tuple(self.problems[place] for place in places), arithmetic)

    def shares(self, answers: Answers) -> dict[ProblemSet, Share]:
        return {name: _share(each) for name, each in self.split(answers).items()}


def _share(answers: Answers) -> Share:
    return {
        "right": sum(answers.right),
        "items": len(answers.right),
        "accuracy": answers.accuracy,
        "interval": answers.interval,
    }


def num_answers(models: Sequence[BuiltinModel], sets: ProblemSets) -> int:
    """That will be asked for at most, for a progress bar."""
    alone = together = 0
    for model in models:
        faults = faults_of(model)
        options = {_key(fault.options) for fault in faults} | {_key({})}
        alone += 1 + sum(fault.only_mixed for fault in faults)
        together += len(options) + len(faults)
    return alone * len(sets.places_alone()) + together * len(sets.problems)


def faults_of(model: BuiltinModel) -> list[StoryFault]:
    return [fault for fault in STORY_FAULTS if fault.model == model.name]


def run(
    models: Sequence[BuiltinModel],
    sets: ProblemSets,
    device: str,
    report: Callable[[], None],
    *,
    batch_invariant: bool = False,
) -> WitnessFigures:
    found = find_device(device)
    options = {"device": found.kind, "batch_invariant": batch_invariant}
    names = {model.name for model in models}
    return {
        "device": f"{found.kind} ({found.name})",
        "batch": BATCH,
        "batch_invariant": batch_invariant,
        "models": [_Model(model, sets, options, report).figures() for model in models],
        "unseen": [
            {"story": each.story, "model": each.model, "what": each.what, "fault": each.fault,
             "check": each.check}
            for each in UNSEEN
            if each.model in names
        ],
    }  # fmt: skip


@contextmanager
def engine_of(model: BuiltinModel, options: JSON) -> Iterator[LLMEngine]:
    """Eager: a capture of graphs would take longer than what is asked. Without a prefix cache, so
    that every answer is computed."""
    engine = LLMEngine(
        model.name,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
        enforce_eager=True,
        **options,
    )
    try:
        yield engine
    finally:
        engine.core.close()


class _Model:
    def __init__(
        self, model: BuiltinModel, sets: ProblemSets, options: JSON, report: Callable[[], None]
    ) -> None:
        self.model, self.sets, self.options, self.report = model, sets, options, report
        self.places_alone = sets.places_alone()
        self.sets_alone = sets.only(self.places_alone)
        self.right: dict[str, Answers] = {}
        """In the batch, by the engine's options."""

    def figures(self) -> ModelFigures:
        with self._engine({}) as engine:
            self.spec = engine.spec
            alone = self._alone(engine)
            batch = self.right[_key({})] = self._together(engine)
        shares = self.sets.shares(batch)
        same = self.sets_alone.split(batch.of(self.places_alone))
        return {
            "model": self.model.name,
            "stands_for": self.model.stands_for,
            "family": self.spec.family,
            "right": {
                name: _right(each, same[name], shares[name])
                for name, each in self.sets_alone.split(alone).items()
            },
            "faults": [self._fault(fault) for fault in faults_of(self.model)],
        }

    def _engine(self, options: JSON) -> AbstractContextManager[LLMEngine]:
        return engine_of(self.model, self.options | options)

    def _alone(self, engine: LLMEngine) -> Answers:
        return ask_alone(engine, self.sets_alone.problems, self.report)

    def _together(self, engine: LLMEngine) -> Answers:
        return ask_together(engine, self.sets.problems, self.report)

    def _right(self, options: JSON) -> Answers:
        key = _key(options)
        if key not in self.right:
            with self._engine(options) as engine:
                self.right[key] = self._together(engine)
        return self.right[key]

    def _fault(self, fault: StoryFault) -> FaultFigures:
        reason = fault.not_covered(self.spec, self.options["device"])
        figures: FaultFigures = {
            "story": fault.story,
            "what": fault.what,
            "faults": list(fault.faults),
            "historical": fault.historical,
            "emulated": fault.emulated,
            "options": fault.options,
            "not_covered": reason,
            "right": {},
            "with_fault": {},
            "with_fault_alone": {},
            "calls": {},
            "answers_changed": 0,
            "acted": False,
            "stopped": None,
        }
        if reason is None:
            self._measure(fault, figures)
        return figures

    def _measure(self, fault: StoryFault, figures: FaultFigures) -> None:
        right = self._right(fault.options)
        answers = Answers.none(len(right.texts))
        with switched_on(fault) as counts:
            try:
                with self._engine(fault.options) as engine:
                    answers = self._together(engine)
                    calls = Counter(counts)
                    if fault.only_mixed:
                        figures["with_fault_alone"] = self.sets_alone.shares(self._alone(engine))
            except EngineBroken as error:
                figures["stopped"], calls = str(error), Counter(counts)
            except RuntimeError as error:  # a kernel that was launched wrongly
                figures["stopped"], calls = described(error), Counter(counts)
        figures["right"] = self.sets.shares(right)
        figures["with_fault"] = self.sets.shares(answers)
        figures["calls"] = {name: calls[name] for name in fault.faults}
        figures["answers_changed"] = changed = answers.differing(right)
        acted = changed > 0 if fault.historical else answers.logprobs != right.logprobs
        figures["acted"] = acted and min(figures["calls"].values()) > 0


def _right(alone: Answers, same: Answers, batch: Share) -> RightFigures:
    """`same`: answers to the same problems, in the batch."""
    pairs = list(zip(alone.right, same.right, strict=True))
    return {
        "alone": _share(alone),
        "batch": batch,
        "answers_differ": alone.differing(same),
        "p": mcnemar(pairs.count((True, False)), pairs.count((False, True))),
    }


def _key(options: JSON) -> str:
    return json.dumps(options, sort_keys=True)
