"""Boxes of things; a ride with people getting on and off."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw
from trueline.tasks.kinds.story import Story, Unfit, a


def boxes(draw: Draw, operations: int) -> Story:
    """Containers with so many things in each; some come, some go, the rest is shared."""
    story = Story()
    thing, box = draw.things()[0], draw.one(words.CONTAINERS)
    count, each = draw.between(2, 9), draw.between(2, 99)
    where = draw.one(("There are", "A shop has", "A farmer has", "The school has", "A baker has"))
    story.tell(f"{where} {draw.spell(count)} {box} with {each} {thing} in each.")
    total = story.compute(count, "*", each)
    while len(story.steps) < operations:
        left = operations - len(story.steps)
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
    """People get on and off."""
    story = Story()
    what = draw.one(words.RIDES)
    total = draw.number(5, 300)
    story.tell(
        draw.one(
            (f"{a(what).capitalize()} leaves with {total} people.",
             f"There are {total} people on {a(what)}.")
        )
    )  # fmt: skip
    stop = draw.one(("At the next stop", "At the next place", "Later"))
    while len(story.steps) < operations:
        if total < 4:
            raise Unfit
        on, off = draw.number(2, 200), draw.number(2, total - 1)
        both = operations - len(story.steps) > 1 and draw.chance(0.5)
        if both and draw.chance(0.5):
            story.tell(f"{stop} {on} people get on and {off} get off.")
            total = story.compute(story.compute(total, "+", on), "-", off)
        elif both:
            story.tell(f"{stop} {off} people get off and {on} get on.")
            total = story.compute(story.compute(total, "-", off), "+", on)
        elif draw.chance(0.5):
            story.tell(f"{stop} {draw.spell(on)} people get on.")
            total = story.compute(total, "+", on)
        else:
            story.tell(f"{stop} {draw.spell(off)} people get off.")
            total = story.compute(total, "-", off)
    story.question = draw.one(
        (f"How many people are on the {what} now?", f"How many people are on the {what}?",
         f"How many people are left on the {what}?")
    )  # fmt: skip
    return story
