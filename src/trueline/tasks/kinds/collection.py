"""Somebody has things, gets more and gives some away."""

from __future__ import annotations

from collections.abc import Callable

from trueline.tasks import words
from trueline.tasks.draw import Draw, Person
from trueline.tasks.kinds.story import Story, Unfit


def collection(draw: Draw, operations: int) -> Story:
    """Somebody has things, gets more and gives some away."""
    story = Story()
    me, friend = draw.people(2)
    story.me = me
    thing = draw.things()[0]
    boxed = operations > 1 and draw.chance(0.15)
    if boxed:
        count, each = draw.between(2, 9), draw.between(2, 60)
        total = start = story.compute(count, "*", each)
        box = draw.one(words.CONTAINERS)
        story.tell(f"{me.name} has {draw.spell(count)} {box} of {each} {thing}.")
    else:
        total = start = draw.number(2, 400)
        story.tell(_opening(draw, me, thing, start))
    while len(story.steps) < operations:
        left = operations - len(story.steps)
        change = draw.one(_CHANGES_IN_TWO if left > 1 and draw.chance(0.35) else _CHANGES)
        total = change(draw, story, me, friend, thing, start, total)
    story.question = draw.one(
        (
            f"How many {thing} does {me.name} have now?",
            f"How many {thing} does {me.name} have in the end?",
            f"How many {thing} does {me.name} have?",
            f"How many {thing} are there now?",
            f"How many {thing} does {draw.one((me.name, me.subject.lower()))} have left?",
            f"How many {thing} does {me.name} have in total?",
            f"How many does {draw.one((me.name, me.subject.lower()))} have now?",
            f"How many {thing} does {me.name} have altogether?",
        )
    )
    return story


def _opening(draw: Draw, me: Person, thing: str, start: int) -> str:
    return draw.one(
        (
            f"{me.name} has {start} {thing}.",
            f"{me.name} starts with {start} {thing}.",
            f"There are {start} {thing} in {me.name}'s bag.",
            f"{me.name} had {start} {thing} this morning.",
            f"{me.name} owns {start} {thing}.",
        )
    )


Change = Callable[[Draw, Story, Person, Person, str, int, int], int]


def _subject(draw: Draw, me: Person) -> str:
    then = draw.chance(0.25)
    name = draw.chance(0.3)
    if then:
        return f"Then {me.name if name else me.subject.lower()}"
    return me.name if name else me.subject


def _gains(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    count, who = draw.number(2, 400), _subject(draw, me)
    number = draw.spell(count)
    story.tell(
        draw.one(
            (
                f"{who} buys {number} more {thing}.",
                f"{who} buys {number} {thing}.",
                f"{who} finds {number} {thing} {draw.one(words.PLACES)}.",
                f"{who} gets {number} more from {friend.name}.",
                f"{who} gets {number} {thing} as a gift.",
                f"{who} wins {number} {thing}.",
                f"{who} makes {number} more {thing}.",
                f"{who} collects {number} {thing} {draw.one(words.PLACES)}.",
                f"{friend.name} gives {me.him} {number} {thing}.",
                f"{friend.name} brings {me.him} {number} more {thing}.",
            )
        )
    )
    return story.compute(total, "+", count)


def _loses(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    if total < 4:
        raise Unfit
    count, who = draw.number(2, total - 1), _subject(draw, me)
    number = draw.spell(count)
    story.tell(
        draw.one(
            (
                f"{who} gives {number} {thing} to {friend.name}.",
                f"{who} gives {number} of them to {friend.name}.",
                f"{who} gives {friend.name} {number} {thing}.",
                f"{who} loses {number} {thing} {draw.one(words.PLACES)}.",
                f"{who} loses {number} of the {thing}.",
                f"{who} sells {number} {thing}.",
                f"{who} throws away {number} {thing}.",
                f"{who} eats {number} of them.",
                f"{who} breaks {number} {thing}.",
                f"{who} uses {number} of the {thing}.",
                f"{who} drops {number} {thing} {draw.one(words.PLACES)}.",
                f"{number.capitalize()} of them break.",
                f"{number.capitalize()} of the {thing} get lost.",
                f"{friend.name} takes {number} of the {thing}.",
            )
        )
    )
    return story.compute(total, "-", count)


def _multiplies(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    factor = draw.between(2, 5)
    times = words.TIMES[factor]
    story.tell(
        draw.one(
            (
                f"{_subject(draw, me)} works hard and soon has {times} as many {thing}.",
                f"A month later {me.name} has {times} as many {thing}.",
                f"A wizard makes it {times} as many.",
            )
        )
    )
    return story.compute(total, "*", factor)


def _shares(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    part = draw.between(2, 4)
    if part == 2 and draw.chance(0.5):
        text = f"{_subject(draw, me)} gives half of the {thing} to {friend.name}."
    else:
        text = f"{_subject(draw, me)} keeps {words.SHARES[part]} of the {thing}."
    story.tell(text)
    return story.compute(total, "/", part)


def _as_many_as_before(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, start: int, total: int
) -> int:
    """A value used again later."""
    story.tell(f"{_subject(draw, me)} finds as many {thing} as {me.subject.lower()} had at first.")
    return story.compute(total, "+", start)


_CHANGES: tuple[Change, ...] = (
    *(_gains, _gains, _gains, _loses, _loses, _loses),
    *(_multiplies, _shares, _as_many_as_before),
)


def _gains_in_boxes(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    count, each = draw.between(2, 9), draw.between(2, 60)
    number, box = draw.spell(count), draw.one(words.CONTAINERS)
    story.tell(
        draw.one(
            (
                f"{_subject(draw, me)} buys {number} {box} with {each} {thing} in each.",
                f"{_subject(draw, me)} finds {number} {box} of {each} {thing} each.",
                f"{number.capitalize()} friends each give {me.him} {each} {thing}.",
            )
        )
    )
    return story.compute(total, "+", story.compute(count, "*", each))


def _gives_to_each(
    draw: Draw, story: Story, me: Person, friend: Person, thing: str, _: int, total: int
) -> int:
    count, each = draw.between(2, 9), draw.between(2, 40)
    number = draw.spell(count)
    story.tell(
        draw.one(
            (
                f"{_subject(draw, me)} gives {each} {thing} to each of {number} friends.",
                f"{_subject(draw, me)} fills {number} {draw.one(words.CONTAINERS)} with "
                f"{each} {thing} each and sells them.",
            )
        )
    )
    return story.compute(total, "-", story.compute(count, "*", each))


_CHANGES_IN_TWO: tuple[Change, ...] = (_gains_in_boxes, _gives_to_each)
