"""Which places canaries look at, and what they hold to be known of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from trueline.cache.pool import NULL
from trueline.cache.slots import StateSlots
from trueline.engine.canaries.claims import Claims, claimed_blocks, claimed_slots, named_slots
from trueline.engine.canaries.history import MOST_STEPS, History
from trueline.engine.canaries.places import FIXED_SHARE, TRAPS, Places
from trueline.engine.messages import Admission, StepMessage, StepRow
from trueline.engine.params import SamplingParams

SIZE = 5


def row(id: int, start: int, count: int, *tables: list[int], **others: object) -> StepRow:
    return StepRow(
        id=id,
        start=start,
        token_ids=[0] * count,
        tables=list(tables),
        is_decode=count == 1 and start > 0,
        samples=True,
        **others,  # type: ignore[arg-type]
    )


class Memory:
    """What is really there, beside what is held to be known."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.bytes = torch.randint(1 << 30, (places.count, places.positions))
        self.sums: dict[int, torch.Tensor] = {}

    def write(self, place: int, start: int, stop: int) -> None:
        self.bytes[place, start:stop] = torch.randint(1 << 30, (stop - start,))
        self.places.write([place], [start], [stop], [7], [False])

    def look(self, step: int) -> list[int]:
        """Nothing that is known has changed."""
        chosen = self.places.choose(step, everything=False)
        for place, first, known, written in zip(
            *(
                each.tolist()
                for each in (chosen.places, chosen.first, chosen.known, chosen.written)
            ),
            strict=True,
        ):
            if known:
                was, now = self.sums[place], self.bytes[place]
                assert torch.equal(was[first:known], now[first:known]), (step, place)
            self.sums[place] = self.bytes[place].clone()
            assert written <= self.places.positions
        found: list[int] = chosen.places.tolist()
        assert len(set(found)) == len(found)
        return found


@pytest.mark.parametrize("most", [1, 4, 9, 100])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_known_is_what_nobody_writes(most: int, padded: bool, seed: int) -> None:
    """Blocks filled token by token or by several, taken back by a few, and given to others;
    poisoned where nobody has them; the null place written by padding."""
    draw = random.Random(seed)
    places = Places(23, SIZE, most, scribbled=int(padded))
    memory = Memory(places)
    filled = Counter[int]()
    for step in range(150):
        for place in draw.sample(range(1, 22), draw.randint(0, 4)):
            start = draw.choice([0, filled[place], max(filled[place] - 2, 0)])
            start = start if start < SIZE else 0
            stop = draw.randint(start + 1, SIZE)
            filled[place] = stop
            memory.write(place, start, stop)
        if padded:
            memory.bytes[NULL, 0] = step
        if draw.random() < 0.2:
            blanks = draw.sample(range(22), 3)
            memory.bytes[blanks] = -1
            places.poison(blanks)
            filled.update({place: SIZE - filled[place] for place in blanks})
        if draw.random() < 0.2:
            cells = [draw.randrange(SIZE, 22 * SIZE) for _ in range(3)]
            memory.bytes.view(-1)[cells] = -1
            places.poison_cells(cells)
        memory.look(step)


def test_a_write_in_what_is_known_is_no_reason_to_forget_what_is_before() -> None:
    """A block that goes on keeps what is known of its beginning."""
    places = Places(9, SIZE, 100, scribbled=0)
    places.write([3], [0], [2], [1], [False])
    places.choose(1, everything=False)
    assert places.known[3] == 2
    places.write([3], [2], [3], [1], [False])
    assert (places.known[3], places.written[3]) == (2, 3)
    places.write([3], [1], [3], [1], [False])
    assert places.known[3] == 0
    places.choose(2, everything=False)
    assert places.known[3] == 3
    places.forget()
    assert not places.known.any()


@pytest.mark.parametrize("most", [8, 12, 30, 200])
def test_everything_that_is_used_has_its_turn(most: int) -> None:
    """And the null place, the one behind the last, and some others every time."""
    places = Places(200, SIZE, most, scribbled=0)
    used = 40
    for place in range(1, used):
        places.write([place], [0], [SIZE], [1], [True])
    fixed = {NULL, 199, *range(199 // TRAPS, 200, 199 // TRAPS)}
    if len(fixed) > most // FIXED_SHARE:
        fixed = set()
    seen = Counter[int]()
    turns = -(-(used + 1) // max(most - len(fixed), 1))
    for step in range(turns):
        found = set(places.choose(step, everything=False).places.tolist())
        assert fixed <= found
        assert len(found) <= most
        seen.update(found)
    wanted = range(200) if most >= 200 else [*range(used), 199]
    assert set(wanted) <= seen.keys()
    places = Places(200, SIZE, most, scribbled=0)
    assert not len(places.choose(0, everything=True))


def test_what_was_written_comes_first_and_all_of_it_comes() -> None:
    places = Places(1000, SIZE, 40, scribbled=0)
    for place in range(1, 600):
        places.write([place], [0], [SIZE], [1], [False])
    seen: set[int] = set()
    for step in range(50):
        found = set(places.choose(step, everything=False).places.tolist())
        assert len(found - seen) >= 16 or len(seen) >= 590
        seen |= found
    assert set(range(1, 600)) <= seen
    again = Places(1000, SIZE, 40, scribbled=0)
    again.write([500], [0], [SIZE], [1], [True])
    assert 500 not in again.choose(0, everything=False).places.tolist()


def test_what_is_written_all_the_time_leaves_room_for_others() -> None:
    """Under load as many low places as fit into a check are written in every step."""
    places, high = Places(1000, SIZE, 40, scribbled=0), 599
    for place in range(1, 600):
        places.write([place], [0], [SIZE], [1], [place != high])
    seen: set[int] = set()
    for step in range(4):
        for place in range(1, 40):
            places.write([place], [0], [SIZE], [1], [False])
        seen |= set(places.choose(step, everything=False).places.tolist())
    assert high in seen, "long before its turn among those that nobody writes"


def test_what_rows_may_write() -> None:
    """Positions [start, start + count) by their tables; the window's blocks behind are null."""
    step = StepMessage(
        rows=[
            row(4, 7, 1, [9, 3], [0, 8]),
            row(5, 3, 9, [6, 2, 1], [5, 4, 7]),
        ]
    )
    claims = claimed_blocks(step, group=0, size=SIZE, keeps_ends=False)
    assert claims.places == [3, 6, 2, 1]
    assert claims.starts == [2, 3, 0, 0]
    assert claims.stops == [3, 5, 5, 2]
    assert claims.writers == [4, 5, 5, 5]
    assert not any(claims.again)
    assert not claims.refused()
    assert claims.of(5) == [6, 2, 1]
    assert claimed_blocks(step, group=1, size=SIZE, keeps_ends=False).places == [8, 5, 4, 7]
    ends = StepMessage(rows=[row(1, 0, 13, [0, 4, 7])])
    assert claimed_blocks(ends, group=0, size=SIZE, keeps_ends=False).refused() == [NULL]
    claims = claimed_blocks(ends, group=0, size=SIZE, keeps_ends=True)
    assert (claims.places, claims.starts, claims.stops) == ([4, 7], [0, 0], [5, 3])
    drafts = StepMessage(rows=[row(1, 4, 3, [2, 7])])
    claims = claimed_blocks(drafts, group=0, size=SIZE, keeps_ends=True)
    assert (claims.places, claims.starts, claims.stops) == ([2, 7], [4, 0], [5, 2])


def test_which_slots_rows_may_write() -> None:
    """Not the one that they start from."""
    first = StateSlots(slot=3, source=5, snapshots=((8, 6),), drafts=(1, 2))
    step = StepMessage(
        rows=[row(4, 7, 3, [], state=first), row(9, 0, 1, [], state=StateSlots(4, None))]
    )
    claims = claimed_slots(step)
    assert claims.places == [3, 1, 2, 6, 4]
    assert claims.again == [True, True, True, False, True]
    assert set(claims.stops) == {1}
    assert set(named_slots(step.rows[0])) == {3, 5, 6, 1, 2}
    assert named_slots(step.rows[1]) == (4,)
    assert named_slots(row(1, 0, 1, [])) == ()


@pytest.mark.parametrize(
    ("places", "refused"),
    [([1, 2, 3], []), ([], []), ([4, 2, 4], [4]), ([NULL], [NULL]), ([3, NULL, 3, 1], [NULL, 3])],
)
def test_what_no_step_may_write(places: list[int], refused: list[int]) -> None:
    claims = Claims()
    for place in places:
        claims.add(place, 0, 1, 1, False)
    assert claims.refused() == refused


def test_who_ran_is_remembered_for_a_while() -> None:
    """Names and tables too, and no longer."""
    history = History()
    for id in range(3):
        params = SamplingParams()
        history.admit(
            Admission(id=id, request_id=f"r{id}", prompt_token_ids=[1], params=params, seed=0,
                      eos_token_ids=[], bad_word_ids=[])
        )  # fmt: skip
    claims = {"blocks": Claims()}
    claims["blocks"].add(5, 0, 1, 1, False)
    history.add(1, StepMessage(rows=[row(1, 0, 1, [5, 6]), row(0, 3, 1, [7])]), claims)
    history.captured(8)
    history.add(2, StepMessage(rows=[row(0, 4, 1, [7, 8])], ended=[1]), {})
    assert history.holders(0, 5) == ["r1 (ended)"]
    assert history.holders(0, 8) == ["r0"]
    assert history.holders(0, 9) == []
    first, second = history.steps(range(1, 3))
    assert (first.step, first.graph_rows, second.graph_rows) == (1, 8, None)
    assert [each.request for each in first.rows] == ["r1", "r0"]
    assert first.rows[0].places == {"blocks": [5]}
    assert history.tables(range(1, 2)) == {"r1": [[5, 6]], "r0": [[7, 8]]}
    assert history.tables(range(2, 3)) == {"r0": [[7, 8]]}
    assert history.writer(-1) is None
    assert history.writer(1) == "r1"
    for number in range(3, 2 + MOST_STEPS):
        history.add(number, StepMessage(rows=[row(0, number, 1, [7])]), {})
    assert history.holders(0, 5) == ["r1 (ended)"]
    history.add(2 + MOST_STEPS, StepMessage(rows=[]), {})
    assert len(history.steps(range(1000))) == MOST_STEPS
    history.add(3 + MOST_STEPS, StepMessage(rows=[]), {})
    assert history.holders(0, 5) == []
    assert history.writer(1) == "number 1"
