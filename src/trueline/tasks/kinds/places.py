"""Boxes of things; crowds that come and go."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw
from trueline.tasks.kinds.story import Story, Unfit


def boxes(draw: Draw, operations: int) -> Story:
    """Containers with so many things in each; some come, some go, the rest is shared."""
    story = Story()
    thing, (single, box) = draw.things()[0], draw.one(tuple(words.ONE_CONTAINER.items()))
    count, each = draw.between(2, 9), draw.between(2, 99)
    where = draw.one(("There are", "A shop has", "A farmer has", "The school has", "A baker has"))
    number = draw.spell(count)
    story.tell(
        draw.one(
            (
                f"{where} {number} {box} with {each} {thing} in each.",
                f"{where} {number} {box} of {each} {thing} each.",
                f"{where} {number} {box}. Each {single} has {each} {thing}.",
                f"Each {single} holds {each} {thing}. {where} {number} {box}.",
            )
        )
    )
    total = story.compute(count, "*", each)
    while story.operations < operations:
        left = operations - story.operations
        how = draw.between(0, 4)
        if how == 0 and left > 1:
            again, inside = draw.between(2, 9), draw.between(2, 60)
            other = draw.one(words.CONTAINERS)
            story.tell(f"There are also {draw.spell(again)} {other} with {inside} {thing} in each.")
            total = story.compute(total, "+", story.compute(again, "*", inside))
        elif how == 1:
            gone = draw.number(2, max(total - 1, 2))
            story.tell(
                draw.one(
                    (f"{gone} {thing} are sold.", f"{gone} of the {thing} break.",
                     f"{gone} {thing} are taken away.")
                )
            )  # fmt: skip
            total = story.compute(total, "-", gone)
        elif how == 2:
            more = draw.number(2, 300)
            story.tell(
                draw.one(
                    (f"{more} {thing} are added.", f"{more} more {thing} are brought.",
                     f"Then {more} {thing} arrive.")
                )
            )  # fmt: skip
            total = story.compute(total, "+", more)
        elif left == 1 and how == 3:
            size = draw.between(2, 9)
            story.tell(f"The {thing} are packed into {box} of {draw.spell(size)}.")
            story.compute(total, "/", size)
            story.question = draw.one(
                (f"How many {box} are there then?", f"How many {box} are needed?")
            )
            return story
        elif left == 1:
            people = draw.between(2, 9)
            who = draw.one(("children", "friends", "people", "classes", "families"))
            story.tell(f"{draw.spell(people).capitalize()} {who} share all the {thing} equally.")
            story.compute(total, "/", people)
            story.question = draw.one(
                (
                    f"How many {thing} does each get?",
                    f"How many {thing} are there for each of them?",
                )
            )
            return story
    story.question = draw.one(
        (f"How many {thing} are there now?", f"How many {thing} are there in all?",
         f"How many {thing} are left?")
    )  # fmt: skip
    return story


def ride(draw: Draw, operations: int) -> Story:
    """People get on and off; guests come and go; birds land and fly away."""
    story = Story()
    where, who, come, go = draw.one(words.CROWDS)
    total = draw.number(5, 300)
    story.tell(f"There are {total} {who} {where}.")
    when = draw.one(("At the next stop ", "Later ", "Then ", ""))
    when = "Later " if when.startswith("At") and come != "get on" else when
    while story.operations < operations:
        if total < 4:
            raise Unfit
        more, fewer = draw.number(2, 200), draw.number(2, total - 1)
        both = operations - story.operations > 1 and draw.chance(0.5)
        if both and draw.chance(0.5):
            story.tell(f"{when}{more} {draw.one((who, 'more'))} {come} and {fewer} {go}.")
            total = story.compute(story.compute(total, "+", more), "-", fewer)
        elif both:
            story.tell(f"{when}{fewer} {who} {go} and {more} {come}.")
            total = story.compute(story.compute(total, "-", fewer), "+", more)
        elif draw.chance(0.5):
            story.tell(f"{when}{more} {draw.one((who, f'more {who}'))} {come}.")
            total = story.compute(total, "+", more)
        else:
            story.tell(f"{when}{fewer} {draw.one((who, 'of them'))} {go}.")
            total = story.compute(total, "-", fewer)
    there = where.replace(" a ", " the ")
    story.question = draw.one(
        (f"How many {who} are {there} now?", f"How many {who} are there?",
         f"How many {who} are left {there}?", f"How many {who} are {there}?")
    )  # fmt: skip
    return story
