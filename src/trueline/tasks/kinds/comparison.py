"""Each has so many more, fewer or times as many as somebody before; or is older or younger."""

from __future__ import annotations

from itertools import pairwise

from trueline.tasks import words
from trueline.tasks.draw import Draw, Person
from trueline.tasks.kinds.story import Story, Unfit


def comparison(draw: Draw, operations: int) -> Story:
    """Each person has so many more, fewer or times as many as somebody before."""
    story = Story()
    together = draw.chance(0.4)
    chain = operations - together
    if chain < 1:
        raise Unfit
    people = draw.people(chain + 1 + draw.chance(0.2))
    thing = draw.things()[0]
    counts = [draw.number(2, 400)]
    story.tell(f"{people[0].name} has {counts[0]} {thing}.")
    story.note(people[0].name, counts[0])
    for before, person in pairwise(people[: chain + 1]):
        counts.append(_compared(draw, story, person, before, thing, counts[-1]))
    for person in people[chain + 1 :]:  # nobody asks for them
        unasked = Story()
        other = draw.between(0, chain)
        _compared(draw, unasked, person, people[other], thing, counts[other])
        story.sentences.insert(draw.between(other + 1, len(story.sentences)), *unasked.sentences)
    if draw.chance(0.1):  # what is counted from comes after
        story.sentences[:2] = reversed(story.sentences[:2])
    last = people[chain]
    if together:
        other = draw.between(0, chain - 1)
        pair = [last.name, people[other].name]
        if draw.chance(0.7):
            story.question = draw.one(
                (
                    f"How many {thing} do {pair[1]} and {pair[0]} have together?",
                    f"How many {thing} do {pair[1]} and {pair[0]} have in all?",
                    f"How many {thing} do {pair[1]} and {pair[0]} have in total?",
                )
            )
            if len(people) == 2 and draw.chance(0.3):
                story.question = f"How many {thing} do they have together?"
            story.compute(counts[other], "+", counts[chain], of=(pair[1], pair[0]))
        else:
            more, fewer = (chain, other) if counts[chain] > counts[other] else (other, chain)
            names = people[more].name, people[fewer].name
            story.question = f"How many more {thing} does {names[0]} have than {names[1]}?"
            story.compute(counts[more], "-", counts[fewer], of=names)
    else:
        story.question = draw.one(
            (f"How many {thing} does {last.name} have?", f"How many {thing} has {last.name}?")
        )
    return story


def _compared(
    draw: Draw, story: Story, person: Person, other: Person, thing: str, count: int
) -> int:
    how = draw.between(0, 3)
    if how == 0:
        more = draw.number(2, 300)
        story.tell(f"{person.name} has {draw.spell(more)} more {thing} than {other.name}.")
        return story.compute(count, "+", more, person.name)
    if how == 1:
        if count < 4:
            raise Unfit
        fewer = draw.number(2, count - 1)
        word = draw.one(("fewer", "fewer", "less"))
        story.tell(f"{person.name} has {draw.spell(fewer)} {word} {thing} than {other.name}.")
        return story.compute(count, "-", fewer, person.name)
    if how == 2:
        factor = draw.between(2, 5)
        story.tell(f"{person.name} has {words.TIMES[factor]} as many {thing} as {other.name}.")
        return story.compute(count, "*", factor, person.name)
    part = draw.between(2, 4)
    story.tell(f"{person.name} has {words.SHARES[part]} as many {thing} as {other.name}.")
    return story.compute(count, "/", part, person.name)


def ages(draw: Draw, operations: int) -> Story:
    story = Story()
    later = operations > 1 and draw.chance(0.5)
    people = draw.people(operations - later + 1)
    if len(people) == 2 and draw.chance(0.3):
        relative = f"{people[0].his} {draw.one(words.RELATIVES)}"
        people[1] = Person(relative, she=people[1].she)
    age = draw.between(2, 60)
    story.tell(f"{people[0].name} is {age} years old.")
    story.note(people[0].name, age)
    for before, person in pairwise(people):
        how = draw.between(0, 2)
        if how == 0:
            years = draw.between(2, 30)
            _tell(story, f"{person.name} is {draw.spell(years)} years older than {before.name}.")
            age = story.compute(age, "+", years, person.name)
        elif how == 1:
            years = draw.between(2, max(age - 1, 2))
            _tell(story, f"{person.name} is {draw.spell(years)} years younger than {before.name}.")
            age = story.compute(age, "-", years, person.name)
        else:
            factor = draw.between(2, 4)
            _tell(story, f"{person.name} is {words.TIMES[factor]} as old as {before.name}.")
            age = story.compute(age, "*", factor, person.name)
        if age > 120:
            raise Unfit
    if later:
        years = draw.between(2, 30)
        story.question = f"How old will {people[-1].name} be in {draw.spell(years)} years?"
        story.compute(age, "+", years)
    else:
        story.question = f"How old is {people[-1].name}?"
    return story


def _tell(story: Story, sentence: str) -> None:
    """Of a relative: her brother."""
    story.tell(sentence[0].upper() + sentence[1:])
