"""Sentences that have nothing to do with a story's question."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trueline.tasks import words
from trueline.tasks.draw import Draw

_WEATHER = (
    "The sun",
    "The wind",
    "The rain",
    "A cloud",
    "The snow",
    "The moon",
    "A storm",
    "The fog",
)
_WEATHER_DOES = (
    "is warm today", "comes and goes", "does not stop", "is gone by noon", "is late this year",
    "makes everybody smile", "keeps people inside", "moves over the hills",
)  # fmt: skip
_ANIMALS = tuple("bird cat cow dog duck fox goat hen horse mouse owl pig rabbit sheep".split())
_ANIMAL_DOES = (
    "sleeps", "waits", "looks around", "runs away", "drinks some water", "sits still",
    "plays alone", "hears a noise", "looks for food",
)  # fmt: skip
_SCENES = tuple("house street shop school station library kitchen field bridge tower".split())
_SCENE_IS = (
    "is quiet", "is old", "is full of people", "is closed today", "has a new roof",
    "is near the sea", "smells of bread", "is painted white", "was built long ago", "looks empty",
)  # fmt: skip
_PERSON_DOES = (
    "likes music", "is tired", "sings a song", "goes for a walk", "talks to a friend", "is late",
    "wears a coat", "wants to travel", "cooks some soup", "looks out of the window",
    "calls the doctor", "has a sister", "learns to swim", "drinks tea",
)  # fmt: skip

COUNTED = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
"""About a token each."""


def length(text: str) -> int:
    """About as many tokens as a text has: words, marks and digits, and a space before a number."""
    return len(COUNTED.findall(text)) + len(re.findall(r" [0-9]", text))


def scenery(draw: Draw) -> str:
    """Without a number."""
    how = draw.between(0, 3)
    if how == 0:
        return f"{draw.one(_WEATHER)} {draw.one(_WEATHER_DOES)}."
    if how == 1:
        return f"A {draw.one(_ANIMALS)} {draw.one(_ANIMAL_DOES)} {draw.one(words.PLACES)}."
    if how == 2:
        return f"The {draw.one(words.COLOURS)} {draw.one(_SCENES)} {draw.one(_SCENE_IS)}."
    return f"{draw.person().name} {draw.one(_PERSON_DOES)} {draw.one(words.PLACES)}."


def strangers(draw: Draw, told: str) -> str:
    """A sentence with a number, of people and things that `told` does not name."""
    while True:
        person, thing = draw.person(), draw.things()[0]
        if person.name not in told and thing not in told:
            break
    number = draw.number(2, 400)
    return draw.one(
        (
            f"{person.name} has {number} {thing}.",
            f"{person.name} sees {number} {thing} {draw.one(words.PLACES)}.",
            f"{person.name} buys {number} {thing}.",
            f"{person.name} gives away {number} {thing}.",
            f"{person.name} lives at number {number}.",
            f"{person.name} wants {number} {thing}.",
        )
    )


def sentences(draw: Draw, told: str, numbers: float) -> Iterator[str]:
    """Without end; a share of `numbers` has one."""
    while True:
        yield strangers(draw, told) if draw.chance(numbers) else scenery(draw)


def spread(draw: Draw, facts: list[str], between: list[str]) -> list[str]:
    """The facts in their order, each at a random place among the others."""
    places = sorted(draw.several(range(len(facts) + len(between)), len(facts)))
    known, rest = dict(zip(places, facts, strict=True)), iter(between)
    count = len(facts) + len(between)
    return [known[place] if place in known else next(rest) for place in range(count)]
