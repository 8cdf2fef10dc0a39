"""Random choices of the generator: plain numbers, names, and words that nobody has seen before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from trueline.tasks import words

T = TypeVar("T")

LARGEST = 999
"""Of every number in a story and in its solution."""
INVENTED = 0.08
"""How often a name or a thing is a word of its own, so that a reader's words will do as well."""


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    she: bool

    @property
    def subject(self) -> str:
        return "She" if self.she else "He"

    @property
    def him(self) -> str:
        return "her" if self.she else "him"

    @property
    def his(self) -> str:
        return "her" if self.she else "his"


class Draw:
    def __init__(self, seed: str | int) -> None:
        self._random = Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def one(self, values: Sequence[T]) -> T:
        return values[int(self._random.random() * len(values))]

    def several(self, values: Sequence[T], count: int) -> list[T]:
        return self._random.sample(values, count)

    def number(self, low: int, high: int) -> int:
        """One, two or three digits about equally often, as far as the ends allow."""
        digits = self.between(1, 3)
        ends = max(low, 10 ** (digits - 1)), min(high, 10**digits - 1)
        return self.between(*ends) if ends[0] <= ends[1] else self.between(low, high)

    def spell(self, number: int) -> str:
        """A small number is written out now and then."""
        small = number < len(words.NUMBERS)
        return words.NUMBERS[number] if small and self.chance(0.3) else str(number)

    def invented(self) -> str:
        """A word of two or three syllables."""
        syllables = [self.one(words.LETTERS) + self.one(words.VOWELS) for _ in range(2)]
        return "".join(syllables) + self.one(words.ENDS)

    def person(self) -> Person:
        she = self.chance(0.5)
        if self.chance(INVENTED):
            return Person(self.invented().capitalize(), she)
        return Person(self.one(words.SHE if she else words.HE), she)

    def people(self, count: int) -> list[Person]:
        found: dict[str, Person] = {}
        while len(found) < count:
            person = self.person()
            found.setdefault(person.name, person)
        return list(found.values())

    def things(self, count: int = 1) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            thing = self.invented() + "s" if self.chance(INVENTED) else self.one(words.THINGS)
            found.setdefault(thing)
        return list(found)
