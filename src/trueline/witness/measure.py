"""Problems asked of an engine: one at a time, or in a mixed batch, where prompts of different
lengths come in while others are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from trueline.engine.params import SamplingParams
from trueline.evaluate.statistics import wilson
from trueline.llm import LLMEngine
from trueline.outputs import RequestOutput
from trueline.tasks.stories import Problem, is_right

BATCH = 64
MOST_NEW = 8
"""Requests that come in between two steps, at most: more would make steps of prefill alone."""
MOST_TOKENS = 128
"""Of an answer: right solutions have up to about 90, wrong ones may never end."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, logprobs=0)


@dataclass(frozen=True)
class Answers:
    """To the same problems, in their order."""

    texts: tuple[str, ...]
    right: tuple[bool, ...]
    logprobs: tuple[float | None, ...]
    """Of all tokens of an answer together: they tell a fault that acts and changes no answer."""
    mixed_steps: int
    """Steps that had decode rows and began a prompt."""

    @classmethod
    def none(cls, count: int) -> Answers:
        """Of an engine that has stopped."""
        return cls(("",) * count, (False,) * count, (None,) * count, 0)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        return wilson(self.accuracy, len(self.right))

    def of(self, places: Sequence[int]) -> Answers:
        return Answers(
            tuple(self.texts[i] for i in places),
            tuple(self.right[i] for i in places),
            tuple(self.logprobs[i] for i in places),
            self.mixed_steps,
        )

    def differing(self, other: Answers) -> int:
        return sum(a != b for a, b in zip(self.texts, other.texts, strict=True))


def ask_alone(
    engine: LLMEngine, problems: Sequence[Problem], report: Callable[[], None]
) -> Answers:
    outputs = []
    for problem in problems:
        _ask(engine, "alone", problem)
        done: list[RequestOutput] = []
        while not done:
            done = [output for output in engine.step() if output.finished]
        outputs.append(done[0])
        report()
    return _answers(problems, outputs, 0)


def ask_together(
    engine: LLMEngine, problems: Sequence[Problem], report: Callable[[], None], seed: int = 0
) -> Answers:
    """Up to 64 at once, in another order than given; the same for the same seed."""
    random = Random(seed)
    waiting = random.sample(range(len(problems)), len(problems))
    outputs: dict[int, RequestOutput] = {}
    running = mixed_steps = 0
    while len(outputs) < len(problems):
        room = min(BATCH - running, len(waiting))
        new = min(room, random.randrange(1, MOST_NEW + 1))
        mixed_steps += running > 0 and new > 0
        for _ in range(new):
            place = waiting.pop()
            _ask(engine, str(place), problems[place])
        running += new
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = output
                running -= 1
                report()
    return _answers(problems, [outputs[place] for place in range(len(problems))], mixed_steps)


def _ask(engine: LLMEngine, name: str, problem: Problem) -> None:
    prompt = engine.chat_prompt([{"role": "user", "content": problem.question}])
    engine.add_request(name, prompt, PARAMS)


def _answers(
    problems: Sequence[Problem], outputs: Sequence[RequestOutput], mixed_steps: int
) -> Answers:
    """A request that a fault has made fail is a wrong answer, and says why."""
    completions = [output.outputs[0] for output in outputs]
    texts = [each.error or each.text for each in completions]
    right = (is_right(one.answer, text) for one, text in zip(problems, texts, strict=True))
    logprobs = (each.cumulative_logprob for each in completions)
    return Answers(tuple(texts), tuple(right), tuple(logprobs), mixed_steps)
