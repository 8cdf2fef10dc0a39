"""Prices, purses and wages."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import LARGEST, Draw
from trueline.tasks.kinds.story import Story, Unfit, a


def shop(draw: Draw, operations: int) -> Story:
    """So many of one thing and of another at their prices; what is paid, or left."""
    story = Story()
    me = story.me = draw.person()
    (one, ones), (two, twos) = draw.several(words.PRICED, 2)
    price, other_price = draw.between(2, 40), draw.between(2, 40)
    count, other_count = draw.between(2, 9), draw.between(2, 9)
    kinds = 1 if operations <= 2 else 2
    money = "coins" if draw.chance(0.6) else "dollars"
    if kinds == 2:
        story.tell(
            f"{a(one).capitalize()} costs {price} {money} and {a(two)} costs {other_price} {money}."
        )
    else:
        story.tell(f"{a(one).capitalize()} costs {price} {money}.")
        if draw.chance(0.4):
            story.tell(f"{a(two).capitalize()} costs {other_price} {money}.")
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


def spending(draw: Draw, operations: int) -> Story:
    """What is left of somebody's money after so many things."""
    story = Story()
    me = story.me = draw.person()
    money = "dollars" if draw.chance(0.7) else "coins"
    rest = draw.number(20, LARGEST)
    story.tell(f"{me.name} has {rest} {money}.")
    goods = [a(one) for one, _ in draw.several(words.PRICED, operations)]
    while goods:
        if rest < 4:
            raise Unfit
        first, goods = goods[0], goods[1:]
        price = draw.number(2, rest - 1)
        rest = story.compute(rest, "-", price)
        told = f"{draw.one((me.name, me.subject))} buys {first} for {price} {money}"
        if goods and rest > 3 and draw.chance(0.5):
            second, goods = goods[0], goods[1:]
            price = draw.number(2, rest - 1)
            rest = story.compute(rest, "-", price)
            told += f" and {second} for {price} {money}"
        story.tell(f"{told}.")
    story.question = draw.one(
        (f"How many {money} does {me.name} have left?", f"How much money does {me.name} have left?",
         "How much money is left?", f"How many {money} are left?")
    )  # fmt: skip
    return story


def work(draw: Draw, operations: int) -> Story:
    """So many hours at so much an hour; some of it is spent, some comes from elsewhere."""
    story = Story()
    me = story.me = draw.person()
    wage, hours = draw.between(2, 60), draw.between(2, 9)
    unit = draw.one(("hour", "day", "week"))
    each = draw.one(("an hour" if unit == "hour" else f"a {unit}", f"per {unit}"))
    story.tell(f"{me.name} earns {wage} dollars {each}.")
    story.tell(f"{me.subject} works {draw.spell(hours)} {unit}s.")
    total = story.compute(hours, "*", wage)
    while len(story.steps) < operations:
        if draw.chance(0.5) and total > 3:
            paid = draw.number(2, total - 1)
            what = draw.one(("for food", "for rent", "for a ticket", "for clothes"))
            story.tell(f"{me.subject} {draw.one(('pays', 'spends'))} {paid} dollars {what}.")
            total = story.compute(total, "-", paid)
        else:
            more = draw.number(2, 300)
            gets = draw.one((f"{me.subject} finds", f"Then {me.subject.lower()} wins"))
            story.tell(f"{gets} {more} dollars {draw.one(words.PLACES)}.")
            total = story.compute(total, "+", more)
    story.question = draw.one(
        (
            f"How many dollars does {me.name} have?",
            f"How many dollars does {me.name} have in the end?",
        )
        if operations > 1
        else (f"How many dollars does {me.name} earn?", f"How much does {me.name} earn?")
    )
    return story
