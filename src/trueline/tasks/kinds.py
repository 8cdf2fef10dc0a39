"""The kinds of stories. Each function tells one with exactly the wanted number of operations, or
raises `Unfit`, and is then asked again with other numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from trueline.tasks import words
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
        self.steps: list[str] = []
        self.result = 0

    def tell(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def compute(self, a: int, sign: str, b: int) -> int:
        """Write down a step; its result is the story's until the next."""
        if sign == "/" and a % b:
            raise Unfit
        self.result = SIGNS[sign](a, b)
        # times tables up to 9 x 99, and sums up to three digits
        small = min(a, b) <= 9 and max(a, b) <= 99
        fits = {"*": small, "/": b <= 9 and self.result <= 99}.get(sign, True)
        if not (fits and 0 < self.result <= LARGEST):
            raise Unfit
        self.steps.append(f"{a} {sign} {b} = {self.result}")
        return self.result


Kind = Callable[[Draw, int], Story]


def collection(draw: Draw, operations: int) -> Story:
    """Somebody has things, gets more and gives some away."""
    story = Story()
    me, friend = draw.people(2)
    thing = draw.things()[0]
    total = start = draw.number(2, 400)
    story.tell(
        draw.one(
            (
                f"{me.name} has {start} {thing}.",
                f"{me.name} starts with {start} {thing}.",
                f"There are {start} {thing} in {me.name}'s bag.",
                f"{me.name} had {start} {thing} this morning.",
                f"{me.name} owns {start} {thing}.",
            )
        )
    )
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
        )
    )
    return story


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


def comparison(draw: Draw, operations: int) -> Story:
    """Each person has so many more, fewer or times as many as somebody before."""
    story = Story()
    together = draw.chance(0.4)
    chain = operations - together
    if chain < 1:
        raise Unfit
    people = draw.people(chain + 1 + draw.between(0, 1))
    thing = draw.things()[0]
    counts = [draw.number(2, 400)]
    story.tell(f"{people[0].name} has {counts[0]} {thing}.")
    for before, person in pairwise(people[: chain + 1]):
        counts.append(_compared(draw, story, person, before, thing, counts[-1]))
    for person in people[chain + 1 :]:  # nobody asks for them
        unasked = Story()
        other = draw.between(0, chain)
        _compared(draw, unasked, person, people[other], thing, counts[other])
        story.sentences.insert(draw.between(other + 1, len(story.sentences)), *unasked.sentences)
    last = people[chain]
    if together:
        other = draw.between(0, chain - 1)
        pair = [last.name, people[other].name]
        if draw.chance(0.7):
            story.question = draw.one(
                (
                    f"How many {thing} do {pair[1]} and {pair[0]} have together?",
                    f"How many {thing} do {pair[1]} and {pair[0]} have in all?",
                )
            )
            story.compute(counts[other], "+", counts[chain])
        else:
            more, fewer = (chain, other) if counts[chain] > counts[other] else (other, chain)
            names = people[more].name, people[fewer].name
            story.question = f"How many more {thing} does {names[0]} have than {names[1]}?"
            story.compute(counts[more], "-", counts[fewer])
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
        return story.compute(count, "+", more)
    if how == 1:
        if count < 4:
            raise Unfit
        fewer = draw.number(2, count - 1)
        word = draw.one(("fewer", "fewer", "less"))
        story.tell(f"{person.name} has {draw.spell(fewer)} {word} {thing} than {other.name}.")
        return story.compute(count, "-", fewer)
    if how == 2:
        factor = draw.between(2, 5)
        story.tell(f"{person.name} has {words.TIMES[factor]} as many {thing} as {other.name}.")
        return story.compute(count, "*", factor)
    part = draw.between(2, 4)
    story.tell(f"{person.name} has {words.SHARES[part]} as many {thing} as {other.name}.")
    return story.compute(count, "/", part)


def shop(draw: Draw, operations: int) -> Story:
    """So many of one thing and of another at their prices; what is paid, or left."""
    story = Story()
    me = draw.person()
    (one, ones), (two, twos) = draw.several(words.PRICED, 2)
    price, other_price = draw.between(2, 40), draw.between(2, 40)
    count, other_count = draw.between(2, 9), draw.between(2, 9)
    kinds = 1 if operations <= 2 else 2
    money = "coins" if draw.chance(0.6) else "dollars"
    if kinds == 2:
        story.tell(
            f"{_a(one).capitalize()} costs {price} {money} and {_a(two)} costs {other_price} "
            f"{money}."
        )
    else:
        story.tell(f"{_a(one).capitalize()} costs {price} {money}.")
        if draw.chance(0.4):
            story.tell(f"{_a(two).capitalize()} costs {other_price} {money}.")
    bought = f"{me.name} buys {draw.spell(count)} {ones}"
    paid = story.compute(count, "*", price)
    if kinds == 2:
        bought += f" and {draw.spell(other_count)} {twos}"
        other_paid = story.compute(other_count, "*", other_price)
        paid = story.compute(paid, "+", other_paid)
    story.tell(f"{bought}.")
    if len(story.steps) == operations:
        story.question = draw.one(
            (
                f"How many {money} does {me.name} pay?",
                f"How many {money} does {me.subject.lower()} spend?",
            )
        )
        return story
    purse = draw.number(paid + 1, LARGEST)
    story.sentences.insert(draw.between(0, 1), f"{me.name} has {purse} {money}.")
    rest = story.compute(purse, "-", paid)
    if len(story.steps) < operations:
        earned = draw.number(2, 300)
        story.tell(
            draw.one(
                (
                    f"Then {me.subject.lower()} earns {earned} {money}.",
                    f"{me.subject} finds {earned} {money} {draw.one(words.PLACES)}.",
                )
            )
        )
        story.compute(rest, "+", earned)
    if len(story.steps) != operations:
        raise Unfit
    story.question = draw.one(
        (f"How many {money} does {me.name} have left?", f"How many {money} are left?",
         f"How many {money} does {me.name} have now?")
    )  # fmt: skip
    return story


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


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
            (f"{_a(what).capitalize()} leaves with {total} people.",
             f"There are {total} people on {_a(what)}.")
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


def days(draw: Draw, operations: int) -> Story:
    """What somebody does from day to day, each day told by the one before."""
    story = Story()
    me = draw.person()
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
            counts.append(story.compute(counts[-1], "+", more))
        elif how == 1:
            fewer = draw.number(2, max(counts[-1] - 1, 2))
            story.tell(
                f"On {day} {me.subject.lower()} {does} {fewer} fewer {things} than on {before}."
            )
            counts.append(story.compute(counts[-1], "-", fewer))
        else:
            factor = draw.between(2, 3)
            story.tell(
                f"On {day} {me.subject.lower()} {does} {words.TIMES[factor]} as many {things} "
                f"as on {before}."
            )
            counts.append(story.compute(counts[-1], "*", factor))
    if in_all:
        total = counts[0]
        for count in counts[1:]:
            total = story.compute(total, "+", count)
        story.question = f"How many {things} does {me.name} {do} in all?"
    else:
        story.question = f"How many {things} does {me.name} {do} on {names[len(counts) - 1]}?"
    if len(story.steps) != operations:
        raise Unfit
    return story


def ages(draw: Draw, operations: int) -> Story:
    story = Story()
    later = operations > 1 and draw.chance(0.5)
    people = draw.people(operations - later + 1)
    age = draw.between(2, 60)
    story.tell(f"{people[0].name} is {age} years old.")
    for before, person in pairwise(people):
        how = draw.between(0, 2)
        if how == 0:
            years = draw.between(2, 30)
            story.tell(f"{person.name} is {draw.spell(years)} years older than {before.name}.")
            age = story.compute(age, "+", years)
        elif how == 1:
            years = draw.between(2, max(age - 1, 2))
            story.tell(f"{person.name} is {draw.spell(years)} years younger than {before.name}.")
            age = story.compute(age, "-", years)
        else:
            factor = draw.between(2, 4)
            story.tell(f"{person.name} is {words.TIMES[factor]} as old as {before.name}.")
            age = story.compute(age, "*", factor)
        if age > 120:
            raise Unfit
    if later:
        years = draw.between(2, 30)
        story.question = f"How old will {people[-1].name} be in {draw.spell(years)} years?"
        story.compute(age, "+", years)
    else:
        story.question = f"How old is {people[-1].name}?"
    return story


KINDS: tuple[Kind, ...] = (
    *(collection, collection, collection, comparison, comparison),
    *(shop, boxes, ride, days, ages),
)
"""As often as they are told."""


def tell(draw: Draw, operations: int) -> Story:
    kind = draw.one(KINDS)
    while True:
        try:
            return kind(draw, operations)
        except Unfit:
            continue
