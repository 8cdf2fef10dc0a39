"""Somebody has things, gets more and gives some away."""

from __future__ import annotations

from trueline.tasks import words
from trueline.tasks.draw import Draw
from trueline.tasks.kinds.story import Story, Unfit


def collection(draw: Draw, operations: int) -> Story:
    return _Collection(draw, operations).story


class _Collection:
    def __init__(self, draw: Draw, operations: int) -> None:
        self.draw, self.story = draw, Story()
        self.me, friend = draw.people(2)
        self.story.me = self.me
        relative = f"{self.me.his} {draw.one(words.RELATIVES)}"
        self.friend = draw.one((friend.name, friend.name, friend.name, relative, "a friend"))
        self.thing = draw.things()[0]
        self.total = self.start = self._begin(operations)
        while (left := operations - self.story.operations) > 0:
            if left == 1 and self.story.operations and draw.chance(0.06):
                self._shared_out()
                return
            in_two = left > 1 and draw.chance(0.35)
            self.total = draw.one(self._CHANGES_IN_TWO if in_two else self._CHANGES)(self)
        self.story.question = self._question()

    def _begin(self, operations: int) -> int:
        draw, name, thing = self.draw, self.me.name, self.thing
        if operations > 1 and draw.chance(0.15):
            count, each = draw.between(2, 9), draw.between(2, 60)
            box = draw.one(words.CONTAINERS)
            self.story.tell(f"{name} has {draw.spell(count)} {box} of {each} {thing}.")
            return self.story.compute(count, "*", each)
        start = draw.number(2, 400)
        self.story.tell(
            draw.one(
                (
                    f"{name} has {start} {thing}.",
                    f"{name} starts with {start} {thing}.",
                    f"There are {start} {thing} in {name}'s bag.",
                    f"{name} had {start} {thing} this morning.",
                    f"{name} owns {start} {thing}.",
                    f"{name} makes {start} {thing}.",
                )
            )
        )
        return start

    def _question(self) -> str:
        thing, name = self.thing, self.me.name
        either = self.draw.one((name, self.me.subject.lower()))
        return self.draw.one(
            (
                f"How many {thing} does {name} have now?",
                f"How many {thing} does {name} have in the end?",
                f"How many {thing} does {either} have?",
                f"How many {thing} are there now?",
                f"How many {thing} does {either} have left?",
                f"How many {thing} are left?",
                f"How many {thing} does {name} have in total?",
                f"How many does {either} have now?",
                f"How many {thing} does {name} have altogether?",
            )
        )

    def _who(self) -> str:
        then, name = self.draw.chance(0.25), self.draw.chance(0.3)
        if then:
            return f"Then {self.me.name if name else self.me.subject.lower()}"
        return self.me.name if name else self.me.subject

    def _gains(self) -> int:
        draw, who, thing, friend = self.draw, self._who(), self.thing, self.friend
        count = draw.number(2, 400)
        number, place = draw.spell(count), draw.one(words.PLACES)
        giver = friend[0].upper() + friend[1:]
        self.story.tell(
            draw.one(
                (
                    f"{who} buys {number} more {thing}.",
                    f"{who} buys {number} more.",
                    f"{who} buys {number} {thing}.",
                    f"{who} finds {number} {thing} {place}.",
                    f"{who} gets {number} more from {friend}.",
                    f"{who} gets {number} {thing} as a gift.",
                    f"{who} gets {number} for {self.me.his} birthday.",
                    f"{who} wins {number} {thing}.",
                    f"{who} makes {number} more {thing}.",
                    f"{who} collects {number} {thing} {place}.",
                    f"{giver} gives {self.me.him} {number} {thing}.",
                    f"{giver} brings {self.me.him} {number} more {thing}.",
                )
            )
        )
        return self.story.compute(self.total, "+", count)

    def _loses(self) -> int:
        if self.total < 4:
            raise Unfit
        draw, who, thing, friend = self.draw, self._who(), self.thing, self.friend
        count = draw.number(2, self.total - 1)
        number, place = draw.spell(count), draw.one(words.PLACES)
        first = number.capitalize()
        self.story.tell(
            draw.one(
                (
                    f"{who} gives {number} {thing} to {friend}.",
                    f"{who} gives {number} of them to {friend}.",
                    f"{who} gives {number} to {friend}.",
                    f"{who} gives {friend} {number} {thing}.",
                    f"{who} loses {number} {thing} {place}.",
                    f"{who} loses {number} of the {thing}.",
                    f"{who} sells {number} {thing}.",
                    f"{who} sells {number} of them.",
                    f"{who} throws away {number} {thing}.",
                    f"{who} eats {number} of them.",
                    f"{who} eats {number}.",
                    f"{who} breaks {number} {thing}.",
                    f"{who} uses {number} of the {thing}.",
                    f"{who} drops {number} {thing} {place}.",
                    f"{first} of them break.",
                    f"{first} of the {thing} get lost.",
                    f"{friend[0].upper()}{friend[1:]} takes {number} of the {thing}.",
                )
            )
        )
        return self.story.compute(self.total, "-", count)

    def _multiplies(self) -> int:
        factor = self.draw.between(2, 5)
        times = words.TIMES[factor]
        self.story.tell(
            self.draw.one(
                (
                    f"{self._who()} works hard and soon has {times} as many {self.thing}.",
                    f"A month later {self.me.name} has {times} as many {self.thing}.",
                    f"A wizard makes it {times} as many.",
                )
            )
        )
        return self.story.compute(self.total, "*", factor)

    def _keeps_a_share(self) -> int:
        part = self.draw.between(2, 4)
        if part == 2 and self.draw.chance(0.5):
            self.story.tell(f"{self._who()} gives half of the {self.thing} to {self.friend}.")
        else:
            self.story.tell(f"{self._who()} keeps {words.SHARES[part]} of the {self.thing}.")
        return self.story.compute(self.total, "/", part)

    def _finds_as_many_as_before(self) -> int:
        """A value used again later."""
        before = f"as many {self.thing} as {self.me.subject.lower()} had at first"
        self.story.tell(f"{self._who()} finds {before}.")
        return self.story.compute(self.total, "+", self.start)

    def _gains_in_boxes(self) -> int:
        draw, thing = self.draw, self.thing
        count, each = draw.between(2, 9), draw.between(2, 60)
        number, box = draw.spell(count), draw.one(words.CONTAINERS)
        self.story.tell(
            draw.one(
                (
                    f"{self._who()} buys {number} {box} with {each} {thing} in each.",
                    f"{self._who()} finds {number} {box} of {each} {thing} each.",
                    f"{number.capitalize()} friends each give {self.me.him} {each} {thing}.",
                )
            )
        )
        return self.story.compute(self.total, "+", self.story.compute(count, "*", each))

    def _gives_to_each(self) -> int:
        draw, thing = self.draw, self.thing
        count, each = draw.between(2, 9), draw.between(2, 40)
        number, box = draw.spell(count), draw.one(words.CONTAINERS)
        self.story.tell(
            draw.one(
                (
                    f"{self._who()} gives {each} {thing} to each of {number} friends.",
                    f"{self._who()} fills {number} {box} with {each} {thing} each and sells them.",
                )
            )
        )
        return self.story.compute(self.total, "-", self.story.compute(count, "*", each))

    def _shared_out(self) -> None:
        """The end: what each gets."""
        draw, who, thing = self.draw, self._who(), self.thing
        count = draw.between(2, 9)
        number, (box, boxes) = draw.spell(count), draw.one(tuple(words.ONE_CONTAINER.items()))
        told, asked = draw.one(
            (
                (f"{who} shares them equally among {number} friends.",
                 f"How many {thing} does each friend get?"),
                (f"{who} puts them into {number} {boxes} equally.",
                 f"How many {thing} are in each {box}?"),
            )
        )  # fmt: skip
        self.story.tell(told)
        self.story.question = asked
        self.story.compute(self.total, "/", count)

    _CHANGES = (
        *(_gains, _gains, _gains, _loses, _loses, _loses),
        *(_multiplies, _keeps_a_share, _finds_as_many_as_before),
    )
    _CHANGES_IN_TWO = (_gains_in_boxes, _gives_to_each)
