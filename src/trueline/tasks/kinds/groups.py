"""Parts that make a whole, and what is left of a whole without its parts."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw
from trueline.tasks.kinds.story import Story, Unfit


def _times(draw: Draw, count: int, things: str) -> list[str]:
    """So many different times, in their order; points are made in games."""
    occasions = words.OCCASIONS if things != "points" else (words.GAMES, words.ON_DAYS)
    return list(draw.one([times for times in occasions if len(times) >= count])[:count])


def parts(draw: Draw, operations: int) -> Story:
    """How much somebody does at different times, in all."""
    story = Story()
    me = story.me = draw.person()
    does, do, things = draw.one(words.DONE)
    times = _times(draw, operations + 1, things)
    counts = [draw.number(2, 300) for _ in times]
    done = [f"{count} {things} {time}" for count, time in zip(counts, times, strict=True)]
    told = f"{me.name} {does} {done[0]}"
    for each in done[1:]:
        if " and " not in told and draw.chance(0.6):
            told += f" and {each}"
        else:
            story.tell(f"{told}.")
            told = f"{me.subject} {does} {each}"
    story.tell(f"{told}.")
    total = counts[0]
    for count in counts[1:]:
        total = story.compute(total, "+", count)
    story.question = f"How many {things} does {me.name} {do} {draw.one(('in all', 'in total'))}?"
    return story


def herd(draw: Draw, operations: int) -> Story:
    """Things of several kinds are counted together; some of them go."""
    story = Story()
    me = story.me = draw.person()
    name, kinds = draw.one(words.SORTS)
    count = draw.between(2, min(operations + 1, len(kinds)))
    chosen = draw.several(kinds, count)
    counts = [draw.number(2, 200) for _ in chosen]
    had = [f"{number} {kind}" for number, kind in zip(counts, chosen, strict=True)]
    listed = f"{', '.join(had[:-1])} and {had[-1]}"
    farmer = name == "animals" and draw.chance(0.5)
    story.tell(f"{me.name}{' the farmer' if farmer else ''} has {listed}.")
    total = counts[0]
    for number in counts[1:]:
        total = story.compute(total, "+", number)
    while story.operations < operations:
        place = draw.between(0, count - 1)
        if draw.chance(0.5) and counts[place] > 3:
            gone = draw.number(2, counts[place] - 1)
            counts[place] -= gone
            story.tell(f"{me.subject} {draw.one(('sells', 'gives away'))} {gone} {chosen[place]}.")
            total = story.compute(total, "-", gone)
        else:
            more = draw.number(2, 200)
            story.tell(f"{me.subject} {draw.one(('buys', 'gets'))} {more} more {chosen[place]}.")
            total = story.compute(total, "+", more)
    story.question = draw.one(
        (f"How many {name} does {me.name} have?", f"How many {name} does {me.name} have in all?")
    )
    return story


def left_over(draw: Draw, operations: int) -> Story:
    """A whole that is done part by part."""
    story = Story()
    me = story.me = draw.person()
    whole, things, does = draw.one(words.WHOLES)
    rest = draw.number(30, 999)
    story.tell(f"{whole} has {rest} {things}.")
    done = []
    for time in _times(draw, operations, things):
        if rest < 4:
            raise Unfit
        part = draw.number(2, rest - 1)
        rest = story.compute(rest, "-", part)
        done.append(f"{part} {things} {time}")
    first, *others = done
    told = f"{me.name} {does} {first}"
    for each in others:
        if " and " not in told and draw.chance(0.6):
            told += f" and {each}"
        else:
            story.tell(f"{told}.")
            told = f"{me.subject} {does} {each}"
    story.tell(f"{told}.")
    story.question = f"How many {things} are left?"
    return story


def saving(draw: Draw, operations: int) -> Story:
    """So much every week, on top of what was there."""
    story = Story()
    me = story.me = draw.person()
    each, count = draw.between(2, 80), draw.between(2, 9)
    unit = draw.one(("day", "week", "month"))
    if operations == 1:
        story.tell(f"{me.name} saves {each} dollars a {unit}.")
        story.question = f"How many dollars does {me.name} save in {draw.spell(count)} {unit}s?"
        story.compute(count, "*", each)
        return story
    start = draw.number(2, 300)
    story.tell(f"{me.name} has {start} dollars and saves {each} dollars every {unit}.")
    total = story.compute(start, "+", story.compute(count, "*", each))
    when = f"after {draw.spell(count)} {unit}s"
    if operations == 2:
        story.question = f"How many dollars does {me.name} have {when}?"
        return story
    story.tell(f"{when.capitalize()} {me.subject.lower()} looks at the money.")
    for _ in range(operations - 2):
        if total < 4:
            raise Unfit
        spent = draw.number(2, total - 1)
        story.tell(f"{me.subject} {draw.one(('spends', 'pays'))} {spent} dollars.")
        total = story.compute(total, "-", spent)
    story.question = f"How many dollars does {me.name} have left?"
    return story
