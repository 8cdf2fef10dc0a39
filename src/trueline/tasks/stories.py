"""The task of the built-in models: arithmetic stories with exact answers, told at random.

    Nora has 24 marbles. She buys 13 more marbles. Then she gives 9 of them to Sam. How many
    marbles does Nora have now?

    24 + 13 = 37
    37 - 9 = 28
    #### 28

The splits cannot overlap: which one a question belongs to is a function of its text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from trueline.errors import UsageError, did_you_mean
from trueline.tasks import filler, kinds, other, words
from trueline.tasks.draw import Draw
from trueline.tasks.phrasing import rephrase

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

HELD_OUT = 16
"""One question of so many is for the test, one for validation, the others for training."""
LONG = (605, 795)
"""Tokens of a long question, about: they come out at 600 to 850."""
MIDDLE = (150, 500)


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    solution: str
    """Steps a line each, the answer behind ####."""
    answer: str
    category: str


def _solved(story: kinds.Story, told: list[str], question: str, category: str) -> Problem:
    lines = [*story.steps, f"#### {story.result}"]
    return Problem(" ".join([*told, question]), "\n".join(lines), str(story.result), category)


def _told(draw: Draw, operations: int) -> tuple[kinds.Story, list[str], str]:
    """A story, its sentences and its question in some words."""
    story = kinds.tell(draw, operations)
    return story, *rephrase(draw, story.sentences, story.question, story.me)


def arithmetic(draw: Draw, operations: int, category: str) -> Problem:
    story, told, question = _told(draw, operations)
    around = " ".join([*told, question])
    for _ in range(draw.between(0, 2)):
        if told and draw.chance(0.4):
            told.insert(draw.between(1, len(told)), filler.strangers(draw, around))
    return _solved(story, told, question, category)


def padded(draw: Draw, size: int, category: str) -> Problem:
    """A story of two to four operations, its facts spread over a text of about that many tokens."""
    story, told, question = _told(draw, draw.between(2, 4))
    between = _filled(draw, " ".join([*told, question]), size)
    return _solved(story, filler.spread(draw, told, between), question, category)


def _filled(draw: Draw, around: str, size: int) -> list[str]:
    """Sentences of strangers until all has the size."""
    count = filler.length(around)
    between = []
    for sentence in filler.sentences(draw, around, numbers=0.3):
        if count >= size:
            break
        between.append(sentence)
        count += filler.length(sentence)
    return between


def recall(draw: Draw, category: str) -> Problem:
    """A code that was told somewhere before."""
    count = draw.between(1, 4)
    locked = draw.several([(c, w) for c in words.COLOURS for w in words.LOCKED], count)
    codes = ["".join(str(draw.between(0, 9)) for _ in range(draw.between(4, 6))) for _ in locked]
    facts = [
        f"The code of the {colour} {what} is {code}."
        for (colour, what), code in zip(locked, codes, strict=True)
    ]
    place = draw.between(0, count - 1)
    question = "What is the code of the {} {}?".format(*locked[place])
    between = _filled(draw, " ".join([*facts, question]), draw.number(30, LONG[1]))
    told = filler.spread(draw, facts, between)
    return Problem(" ".join([*told, question]), f"#### {codes[place]}", codes[place], category)


def single(draw: Draw, category: str) -> Problem:
    """One operation: a story, or the bare sum."""
    if draw.chance(0.5):
        return arithmetic(draw, 1, category)
    sign, a, b = _sum(draw)
    story = kinds.Story()
    story.compute(a, sign, b)
    spoken = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}[sign]
    asked = f"{a} {spoken if draw.chance(0.4) else sign} {b}"
    story.question = draw.one(
        (f"What is {asked}?", asked, f"{asked} = ?", f"How much is {asked}?", f"Compute {asked}.")
    )
    return _solved(story, [], story.question, category)


def _sum(draw: Draw) -> tuple[str, int, int]:
    while True:
        sign = draw.one("+-*/")
        a = draw.number(2, 999)
        b = draw.number(2, 999) if sign in "+-" else draw.between(2, 9)
        with suppress(kinds.Unfit):
            kinds.Story().compute(a, sign, b)
            return sign, a, b


def something_else(draw: Draw, category: str) -> Problem:
    return Problem(other.ask(draw), other.REFUSAL, other.REFUSAL, category)


ARITHMETIC = tuple(f"{count} operations" for count in range(2, 6))
_MAKERS: dict[str, Callable[[Draw, str], Problem]] = {
    "1 operation": single,
    ARITHMETIC[0]: lambda draw, name: arithmetic(draw, 2, name),
    ARITHMETIC[1]: lambda draw, name: arithmetic(draw, 3, name),
    ARITHMETIC[2]: lambda draw, name: arithmetic(draw, 4, name),
    ARITHMETIC[3]: lambda draw, name: arithmetic(draw, 5, name),
    "middle": lambda draw, name: padded(draw, draw.between(*MIDDLE), name),
    "long": lambda draw, name: padded(draw, draw.between(*LONG), name),
    "recall": recall,
    "other": something_else,
}
CATEGORIES = tuple(_MAKERS)


def split_of(question: str) -> Split:
    digest = hashlib.blake2b(question.encode(), digest_size=4).digest()
    place = int.from_bytes(digest, "little") % HELD_OUT
    return "test" if place == 0 else "validation" if place == 1 else "train"


def make(draw: Draw, category: str) -> Problem:
    """One of whatever split."""
    return _MAKERS[category](draw, category)


def stream(category: str, split: Split, seed: int = 0) -> Iterator[Problem]:
    """The problems of a category and split, without end, no question twice in the held-out ones."""
    if category not in _MAKERS:
        hint = did_you_mean(category, CATEGORIES)
        raise UsageError(f"category '{category}': accepted: {', '.join(CATEGORIES)}{hint}")
    if split not in SPLITS:
        raise UsageError(f"split '{split}': accepted: {', '.join(SPLITS)}")
    draw = Draw(f"{category} {split} {seed}")
    seen: set[str] = set()
    while True:
        problem = make(draw, category)
        if split_of(problem.question) != split or problem.question in seen:
            continue
        if split != "train":
            seen.add(problem.question)
        yield problem


def problems(category: str, split: Split, count: int, seed: int = 0) -> list[Problem]:
    return list(islice(stream(category, split, seed), count))


_ANSWER = re.compile(r"####\s*(-?[0-9]+)")


def answer_in(text: str) -> str | None:
    """What a solution says in the end: the number behind the last ####, or the refusal."""
    found = _ANSWER.findall(text)
    if found:
        return str(found[-1])
    return other.REFUSAL if text.strip() == other.REFUSAL else None


def is_right(answer: str, text: str) -> bool:
    return answer_in(text) == answer
