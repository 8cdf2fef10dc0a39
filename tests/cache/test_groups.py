"""Several block tables per sequence: groups with other block lengths, and lifetimes of a window."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import product
from random import Random

import pytest

from trueline.cache.blocks import NULL_BLOCK, BlockPool, first_read, most_touched
from trueline.cache.groups import BlockGroups
from trueline.cache.prefix import hash_blocks
from trueline.engine.request import Request, RequestState
from trueline.engine.scheduler import Scheduler
from trueline.engine.scheduler_config import SchedulerConfig
from trueline.engine.step import Row, Step

SALT = b"salt"
Shape = tuple[int, int | None, int] | tuple[int, int | None, int, bool]
# (block length, window, its step, whether of a chunk the ends are kept): one group, two lengths, a
# window beside full attention, all of these; windows that move by several positions, as
# compressors read their tails, kept whole and by their ends.
GROUPS: dict[str, list[Shape]] = {
    "one": [(2, None, 1)],
    "lengths": [(2, None, 1), (6, None, 1)],
    "window": [(2, None, 1), (2, 5, 1)],
    "window first": [(3, 7, 1), (2, None, 1)],
    "all": [(4, None, 1), (2, 5, 1), (6, 9, 1), (2, None, 1)],
    "steps": [(6, None, 1), (2, 5, 1), (2, 6, 3), (3, 3, 3)],
    "ends": [(6, None, 1), (2, 5, 1), (2, 6, 3, True), (3, 3, 3, True), (1, 4, 2, True)],
}


@dataclass(eq=False)
class Client:
    request: Request
    tokens: list[int]
    goal: int


@dataclass
class Flight:
    step: Step
    tables: list[list[list[int]]]
    """Of each row, by group, as they were when the step went out."""


@dataclass
class World:
    """A cache whose cells remember which tokens came up to them, and steps that execute late."""

    shapes: list[Shape]
    num_blocks: int
    lag: int
    caching: bool = True
    clients: list[Client] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        pools = [BlockPool(self.num_blocks, size, self.caching, *w) for size, *w in self.shapes]
        self.groups = BlockGroups(pools)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=3, max_model_len=60), self.groups
        )
        self.cells: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in self.shapes]
        self.flights: deque[Flight] = deque()

    def add(self, tokens: list[int], new: int) -> None:
        request = Request(f"r{len(self.clients)}", len(tokens), new)
        client = Client(request, list(tokens), len(tokens) + new)
        self.clients.append(client)
        self.hash(client)
        self.scheduler.add(request)

    def hash(self, client: Client) -> None:
        client.request.block_hashes = hash_blocks(
            client.tokens, self.groups.hash_size, SALT, client.request.block_hashes
        )

    def client(self, row: Row) -> Client:
        return next(each for each in self.clients if each.request is row.request)

    def turn(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            tables = [[list(table) for table in row.request.tables] for row in step.rows]
            self.flights.append(Flight(step, tables))
            self.seen["preempted"] += len(step.preempted)
        while len(self.flights) > (self.lag if step else 0):
            self.collect()
        self.check()

    def collect(self) -> None:
        flight = self.flights.popleft()
        # also of requests that were preempted since: steps after this one write later
        for row, tables in zip(flight.step.rows, flight.tables, strict=True):
            self.execute(row, tables)
        for row in flight.step.rows:
            self.sample(row)
        self.scheduler.collected(flight.step)

    def execute(self, row: Row, tables: list[list[int]]) -> None:
        client = self.client(row)
        for group, (size, window, step, *ends) in enumerate(self.shapes):
            table = tables[group]
            for p in range(row.start, row.start + row.count):
                block = table[p // size]
                assert block != NULL_BLOCK or any(ends), "a position without a cell"
                self.cells[group][block, p % size] = tuple(client.tokens[: p + 1])
                first = 0 if window is None else max(p // step * step + step - window, 0)
                for q in range(first, row.start if any(ends) else p):
                    assert table[q // size] != NULL_BLOCK, f"group {group}: {q} is gone"
                    found = self.cells[group][table[q // size], q % size]
                    assert found == tuple(client.tokens[: q + 1]), f"group {group}: not its own {q}"

    def sample(self, row: Row) -> None:
        client = self.client(row)
        if row.samples and row.request.state is not RequestState.ENDED:
            client.tokens.append((sum(client.tokens) * 7 + len(client.tokens)) % 3)
            self.hash(client)

    def check(self) -> None:
        for group, pool in enumerate(self.groups.pools):
            pool.check()
            held = Counter(
                block
                for client in self.clients
                if client.request.tables
                for block in client.request.tables[group]
                if block != NULL_BLOCK
            )
            assert {b: pool.references(b) for b in pool.ids if pool.references(b)} == dict(held)
            size, window, step, *ends = self.shapes[group]
            if window is not None:
                most = -(-(window + 7 * (1 + self.lag)) // size) + 1
                if any(ends):  # of each step its end, and what is read after a prefix of 6 or 12
                    prefixes = 3 * -(-(window - step) // size) if self.caching else 0
                    most = min(most, (2 + self.lag) * (-(-window // size) + 1) + prefixes)
                for client in self.clients:
                    table = client.request.tables[group] if client.request.tables else []
                    assert sum(b != NULL_BLOCK for b in table) <= most, "nothing was given back"


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", GROUPS)
def test_every_row_finds_what_it_reads(name: str, lag: int) -> None:
    """Prompts that begin alike, under pressure: shared prefixes, preemption, windows that move."""
    seen: Counter[str] = Counter()
    for seed in range(10):
        dice = Random(seed)
        world = World(GROUPS[name], num_blocks=dice.randint(26, 36), lag=lag)
        common = [dice.randrange(3) for _ in range(24)]
        for _ in range(120):
            if dice.random() < 0.4 and len(world.clients) < 30:
                head = common[: dice.choice([0, 5, 13, 24, 24])]
                world.add([*head, *(dice.randrange(3) for _ in range(dice.randint(1, 9)))],
                          dice.randint(1, 14))  # fmt: skip
            world.turn()
        while world.scheduler.has_unfinished():
            world.turn()
        for client in world.clients:
            assert len(client.tokens) == client.goal
        for pool in world.groups.pools:
            assert pool.num_free == pool.num_usable
        seen += world.seen
        seen["hits"] += world.groups.main.num_hit_tokens // world.groups.lcm_block_size
    assert seen["hits"] > 3
    if world.groups.lcm_block_size == 2:  # longer blocks reserve so much that nobody is
        assert seen["preempted"] > 3


def test_a_prefix_ends_where_every_group_has_its_blocks() -> None:
    groups = BlockGroups(
        [BlockPool(20, 2, True), BlockPool(20, 6, True), BlockPool(20, 2, True, 3)]
    )
    assert (groups.hash_size, groups.lcm_block_size) == (2, 6)
    hashes = hash_blocks(list(range(24)), 2, SALT, [])
    tables = groups.empty()
    groups.allocate(tables, 24)
    assert [len(table) for table in tables] == [12, 4, 12]
    assert groups.register(tables, hashes, 0, 20) == 20
    # 20 tokens are written: ten blocks of 2, three of 6, so 18 can be reused
    found = groups.lookup(hashes, 23)
    assert found.num_tokens == 18
    assert found.tables[:2] == [tables[0][:9], tables[1][:3]]
    # of a window of 3 the next token reads positions 16 and 17: one block, and only such have names
    assert found.tables[2] == [NULL_BLOCK] * 8 + tables[2][8:9]
    assert groups.lookup(hashes, 17).num_tokens == 12
    # what lies outside of the window may be lost, what lies in it may not
    known = [i for i, value in enumerate(hashes) if groups.pools[2].find(value) is not None]
    assert known == [2, 5, 8]
    groups.pools[2].forget(hashes[5])
    assert groups.lookup(hashes, 23).num_tokens == 18
    groups.pools[2].forget(hashes[8])
    assert groups.lookup(hashes, 23).num_tokens == 6
    groups.pools[1].forget(hashes[2])
    assert groups.lookup(hashes, 23).num_tokens == 0


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_what_is_behind_the_window_is_given_back(window: int) -> None:
    """At every residue of the window and the block."""
    for size in (1, 2, 3, 4):
        pool = BlockPool(40, size, True, window)
        groups = BlockGroups([pool])
        tables = groups.empty()
        for written in range(1, 30):
            groups.allocate(tables, written)
            groups.trim(tables, written - 1, written)
            needed = {p // size for p in range(max(written - window + 1, 0), written)}
            kept = {i for i, block in enumerate(tables[0]) if block != NULL_BLOCK}
            assert needed <= kept
            # nothing more than the blocks that the next token's window touches
            assert kept <= needed | {written // size, max(written - window + 1, 0) // size}
        groups.release(tables)
        assert pool.num_free == pool.num_usable


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_a_prefix_has_all_that_the_next_token_reads(window: int) -> None:
    for size in (1, 2, 3, 4):
        groups = BlockGroups([BlockPool(40, size, True, window)])
        hashes = hash_blocks(list(range(24)), size, SALT, [])
        tables = groups.empty()
        groups.allocate(tables, 24)
        groups.register(tables, hashes, 0, 24)
        for num_tokens in range(size, 25, size):
            (table,) = groups.lookup(hashes, num_tokens).tables
            first = max(num_tokens - window + 1, 0) // size
            assert table == [NULL_BLOCK] * first + tables[0][first : num_tokens // size]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tail_is_read_from_the_start_of_its_window(overlap: bool) -> None:
    """A compressor of 3 tokens an entry: with overlap it reads the window before as well. After
    whole windows nothing, or that one, is read: blocks that no prefix needs get no name."""
    window = 6 if overlap else 3
    tail = BlockPool(40, 3, True, window, 3)
    groups = BlockGroups([BlockPool(40, 12, True), tail])
    for position in range(24):
        whole = position // 3 * 3
        assert tail.first_read(position) == max(whole - 3 * overlap, 0)
    hashes = hash_blocks(list(range(26)), 3, SALT, [])
    tables = groups.empty()
    groups.allocate(tables, 26)
    groups.register(tables, hashes, 0, 26)
    assert [tail.find(value) is not None for value in hashes] == [
        overlap and i % 4 == 3 for i in range(8)
    ]
    found = groups.lookup(hashes, 25)
    assert found.num_tokens == 24
    kept = tables[1][7:8] if overlap else []
    assert found.tables[1] == [NULL_BLOCK] * (8 - len(kept)) + kept


def test_a_long_prompt_is_admitted_beside_others() -> None:
    """It will never hold more of a window than the window and a chunk: nothing more is waited
    for."""
    world = World([(2, None, 1), (2, 5, 1)], num_blocks=30, lag=0)
    world.add([0] * 3, 20)
    world.turn()
    world.add([1] * 29, 2)
    world.turn()
    assert world.scheduler.num_running == 2
    groups = world.groups
    # a chunk of 7 and the 4 positions before it lie in at most 6 blocks of 2
    assert groups.ahead(groups.empty(), 29, 7) == [15, 6]
    assert groups.ahead([[], [NULL_BLOCK] * 9 + [1, 2]], 29, 7) == [15, 4]
    assert groups.ahead([[], [NULL_BLOCK] * 9 + [1, 2, 3, 4, 5]], 29, 7) == [15, 1]


@pytest.mark.parametrize("caching", [False, True])
def test_of_a_chunk_only_its_ends_are_kept(caching: bool) -> None:
    """A compressor of 3 tokens with overlap: of a chunk its last window and the open one, and what
    is read after each prefix of 12 tokens."""
    tail = BlockPool(40, 3, caching, 6, 3, keeps_ends=True)
    groups = BlockGroups([BlockPool(40, 12, caching), tail])
    tables = groups.empty()

    def kept() -> list[int]:
        return [i for i, block in enumerate(tables[1]) if block != NULL_BLOCK]

    for start, stop, ends, prefixes in ((0, 31, [9, 10], [3, 7]), (31, 32, [9, 10], []),
                                        (32, 61, [19, 20], [11, 15, 19])):  # fmt: skip
        before = kept()
        missing = groups.missing(tables, stop)[1]
        assert missing <= groups.ahead(tables, stop, stop - start)[1]
        assert missing <= groups.most_held(stop, stop - start)[1] - len(before)
        groups.allocate(tables, stop)
        expected = {*before, *ends, *(prefixes if caching else [])}
        assert kept() == sorted(expected)
        assert missing == len(expected) - len(before)
        groups.trim(tables, start, stop)
        assert kept() == ends
    # drafts: the next step may begin at any of them
    groups.allocate(tables, 69, 62)
    assert kept() == [19, 20, 21, 22]
    groups.release(tables)
    assert tail.num_free == tail.num_usable


def test_blocks_that_are_touched() -> None:
    """As counted position by position."""
    for size, window, step, count in product((1, 2, 3, 4, 8), (1, 4, 5, 8), (1, 2, 4), (1, 2, 5)):
        if window >= step:
            most = max(
                (p + count - 1) // size - first_read(p, window, step) // size + 1
                for p in range(window + step, window + step + 32 * size)
            )
            assert most_touched(size, window, step, count) == most
