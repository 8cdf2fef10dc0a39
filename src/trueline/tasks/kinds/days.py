"""What somebody does from day to day, each day told by the one before."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw
from trueline.tasks.kinds.story import Story, Unfit


def days(draw: Draw, operations: int) -> Story:
    """What somebody does from day to day, each day told by the one before."""
    story = Story()
    me = story.me = draw.person()
    does, do, things = draw.one(words.DONE)
    first = draw.between(0, len(words.DAYS) - 1)
    names = [words.DAYS[(first + i) % len(words.DAYS)] for i in range(operations + 2)]
    counts = [draw.number(2, 300)]
    story.tell(f"On {names[0]} {me.name} {does} {counts[0]} {things}.")
    in_all = operations > 1 and draw.chance(0.5)
    while len(story.steps) + (len(counts) - 1 if in_all else 0) < operations:
        left = operations - len(story.steps) - (len(counts) - 1 if in_all else 0)
        before, day = names[len(counts) - 1], names[len(counts)]
        if in_all and left == 1:
            count = draw.number(2, 300)
            story.tell(f"On {day} {me.subject.lower()} {does} {count} {things}.")
            counts.append(count)
            continue
        how = draw.between(0, 2)
        if how == 0:
            more = draw.number(2, 200)
            story.tell(
                f"On {day} {me.subject.lower()} {does} {more} more {things} than on {before}."
            )
            counts.append(story.compute(counts[-1], "+", more, day))
        elif how == 1:
            fewer = draw.number(2, max(counts[-1] - 1, 2))
            story.tell(
                f"On {day} {me.subject.lower()} {does} {fewer} fewer {things} than on {before}."
            )
            counts.append(story.compute(counts[-1], "-", fewer, day))
        else:
            factor = draw.between(2, 3)
            story.tell(
                f"On {day} {me.subject.lower()} {does} {words.TIMES[factor]} as many {things} "
                f"as on {before}."
            )
            counts.append(story.compute(counts[-1], "*", factor, day))
    if in_all:
        total = counts[0]
        for count in counts[1:]:
            total = story.compute(total, "+", count)
        story.question = (
            f"How many {things} does {me.name} {do} {draw.one(('in all', 'in total'))}?"
        )
    else:
        story.question = f"How many {things} does {me.name} {do} on {names[len(counts) - 1]}?"
    if len(story.steps) != operations:
        raise Unfit
    return story
