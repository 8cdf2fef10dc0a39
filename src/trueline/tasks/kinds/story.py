"""A story while it is being told."""

from __future__ import annotations

from collections.abc import Callable

from trueline.tasks.draw import LARGEST, Draw, Person

SIGNS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
}


class Unfit(Exception):
    """These numbers make no story: a negative count, a remainder, too large."""


class Story:
    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.question = ""
        self.me: Person | None = None  # whose story it is, and nobody else's
        self.steps: list[str] = []
        self.result = 0

    def tell(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def compute(self, a: int, sign: str, b: int, whose: str = "") -> int:
        """Write down a step; its result is the story's until the next. `whose`: where several
        people or days have a number, this one's."""
        if sign == "/" and a % b:
            raise Unfit
        self.result = SIGNS[sign](a, b)
        # times tables up to 9 x 99, and sums up to three digits
        small = min(a, b) <= 9 and max(a, b) <= 99
        fits = {"*": small, "/": b <= 9 and self.result <= 99}.get(sign, True)
        if not (fits and 0 < self.result <= LARGEST):
            raise Unfit
        self.steps.append(f"{whose}{whose and ': '}{a} {sign} {b} = {self.result}")
        return self.result


Kind = Callable[[Draw, int], Story]


def a(word: str) -> str:
    """With its article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
