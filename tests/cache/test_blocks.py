"""The pools and the names of prefixes, by example and against a plain model."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trueline.cache.blocks import NULL_BLOCK, BlockPool
from trueline.cache.pool import PoolError
from trueline.cache.prefix import HASH_BYTES, hash_blocks, prefix_salt
from trueline.cache.slots import NULL_SLOT, SlotPool


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def cached_sequence(pool: BlockPool, text: str) -> list[int]:
    """Blocks that one request filled, registered and released."""
    ids = pool.allocate(len(text))
    for block_id, value in zip(ids, names(text), strict=True):
        pool.register(block_id, value)
    pool.release(ids)
    return ids


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 4, True)
    assert pool.num_usable == pool.num_free == 4
    ids = pool.allocate(4)
    assert sorted(ids) == [1, 2, 3, 4]
    assert NULL_BLOCK not in ids
    assert pool.num_free == 0
    pool.check()


@pytest.mark.parametrize("count", [5, -1])
def test_allocating_what_is_not_there_is_a_bug(count: int) -> None:
    pool = BlockPool(5, 4, True)
    with pytest.raises(PoolError, match=rf"allocate\({count}\): 4 blocks are free"):
        pool.allocate(count)
    assert pool.num_free == 4


def test_a_pool_has_blocks_and_blocks_have_positions() -> None:
    with pytest.raises(PoolError, match="num_blocks=1: a pool takes at least 2 blocks"):
        BlockPool(1, 4, True)
    with pytest.raises(PoolError, match="block_size=0: a block has at least 1 position"):
        BlockPool(4, 0, True)


def test_a_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(5, 4, True)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"a")
    pool.share([block_id])
    assert pool.references(block_id) == 2
    pool.release([block_id])
    assert (pool.references(block_id), pool.num_free) == (1, 3)
    pool.release([block_id])
    assert (pool.references(block_id), pool.num_free) == (0, 4)
    with pytest.raises(PoolError, match="nobody holds"):
        pool.release([block_id])


def test_contents_stay_findable_until_the_block_is_reused() -> None:
    pool = BlockPool(5, 4, True)
    ids = cached_sequence(pool, "ab")
    assert pool.lookup(names("ab")) == ids
    assert pool.num_free == 4
    blank = pool.allocate(2)  # blocks without contents go first
    assert not set(blank) & set(ids)
    assert pool.lookup(names("ab")) == ids
    assert pool.num_evictions == 0
    pool.allocate(1)
    assert pool.lookup(names("ab")) == ids[:1]
    assert pool.num_evictions == 1
    pool.check()


def test_lookup_finds_the_longest_prefix_and_takes_nothing() -> None:
    pool = BlockPool(9, 4, True)
    ids = cached_sequence(pool, "abc")
    assert pool.lookup(names("abx")) == ids[:2]
    assert pool.lookup(names("xbc")) == []
    assert pool.lookup([]) == []
    assert pool.num_free == 8
    assert pool.num_idle(ids) == 3
    pool.share(ids[:2])
    assert pool.num_idle(ids) == 1
    assert pool.num_free == 6


def test_eviction_takes_the_least_recently_released_and_tails_before_heads() -> None:
    pool = BlockPool(5, 4, True)
    old, new = cached_sequence(pool, "ab"), cached_sequence(pool, "xy")
    evicted = [pool.allocate(1)[0] for _ in range(4)]
    assert evicted == [old[1], old[0], new[1], new[0]]


def test_sharing_makes_a_prefix_recent_again() -> None:
    pool = BlockPool(5, 4, True)
    old, new = cached_sequence(pool, "ab"), cached_sequence(pool, "xy")
    pool.share(old)
    pool.release(old)
    assert [pool.allocate(1)[0] for _ in range(4)] == [new[1], new[0], old[1], old[0]]


def test_a_shared_head_outlives_both_tails() -> None:
    pool = BlockPool(4, 4, True)
    first = pool.allocate(2)
    for block_id, value in zip(first, names("hx"), strict=True):
        pool.register(block_id, value)
    pool.share(first[:1])
    second = [first[0], *pool.allocate(1)]
    pool.register(second[1], b"y")
    pool.release(second)
    pool.release(first)
    assert [pool.allocate(1)[0] for _ in range(3)] == [second[1], first[1], first[0]]


def test_of_two_equal_blocks_the_first_is_found() -> None:
    pool = BlockPool(5, 4, True)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.lookup([b"a"]) == [first]
    assert pool.hash_of(second) is None
    pool.release([first, second])
    pool.check()
    assert pool.lookup([b"a"]) == [first]


def test_registering_and_sharing_are_guarded() -> None:
    pool = BlockPool(5, 4, True)
    held, other = pool.allocate(2)
    pool.release([other])
    pool.register(held, b"a")
    with pytest.raises(PoolError, match="other contents"):
        pool.register(held, b"b")
    with pytest.raises(PoolError, match="nobody holds"):
        pool.register(other, b"b")
    with pytest.raises(PoolError, match="no registered contents"):
        pool.share([other])


def test_reset_forgets_contents_and_keeps_holders() -> None:
    pool = BlockPool(5, 4, True)
    (held,) = pool.allocate(1)
    pool.register(held, b"h")
    cached_sequence(pool, "ab")
    pool.reset_prefix_cache()
    pool.check()
    assert pool.lookup([b"h"]) == pool.lookup([b"a"]) == []
    assert (pool.num_free, pool.references(held), pool.generation) == (3, 1, 1)
    pool.release([held])
    pool.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(5, 4, False)
    cached_sequence(pool, "ab")
    assert pool.lookup(names("ab")) == []
    pool.check()


def test_what_is_forgotten_is_not_found_and_stays_with_its_holders() -> None:
    pool = BlockPool(5, 4, True)
    (held,) = pool.allocate(1)
    pool.register(held, b"h")
    (idle,) = cached_sequence(pool, "a")
    for value in (b"h", b"a", b"unknown"):
        pool.forget(value)
    pool.check()
    assert pool.find(b"h") is pool.find(b"a") is None
    assert (pool.references(held), pool.num_free, pool.num_evictions) == (1, 3, 0)
    assert pool.allocate(1) == [idle]  # blank again
    pool.release([held])
    pool.check()


def test_counters() -> None:
    pool = BlockPool(5, 4, True)
    pool.count_query(10, 8)
    pool.count_query(5, 0)
    assert (pool.num_query_tokens, pool.num_hit_tokens) == (15, 8)


CORRUPTIONS = {
    "lost": lambda pool: pool._blank.pop(),
    "twice": lambda pool: pool._blank.append(pool._blank[0]),
    "null": lambda pool: pool._blank.append(NULL_BLOCK),
    "negative": lambda pool: pool._references.__setitem__(1, -1),
    "held and cached": lambda pool: pool._references.__setitem__(next(iter(pool._cached)), 1),
    "no hash": lambda pool: pool._hash_of.pop(next(iter(pool._cached))),
    "hash of blank": lambda pool: pool._hash_of.update({pool._blank[0]: b"z"}),
    "not inverse": lambda pool: pool._place_of.update(a=9),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_can_fail(what: str) -> None:
    pool = BlockPool(9, 4, True)
    cached_sequence(pool, "ab")
    pool.check()
    CORRUPTIONS[what](pool)
    with pytest.raises(PoolError, match="not true any more"):
        pool.check()


# Slots


def with_snapshots(text: str) -> tuple[BlockPool, SlotPool, list[int]]:
    """A sequence of idle blocks, and a snapshot at the end of each."""
    pool, slots = BlockPool(4, 4, True), SlotPool(5)
    pool.dependent = slots
    cached_sequence(pool, text)
    ids = slots.allocate(len(text))
    for slot, value in zip(ids, names(text), strict=True):
        slots.register(slot, value)
    slots.release(ids)
    return pool, slots, ids


def test_a_slot_pool_has_slots() -> None:
    with pytest.raises(PoolError, match="num_slots=1: a pool takes at least 2 slots"):
        SlotPool(1)
    slots = SlotPool(3)
    assert NULL_SLOT not in slots.allocate(2)
    with pytest.raises(PoolError, match=r"allocate\(1\): 0 slots are free"):
        slots.allocate(1)


def test_snapshots_go_with_their_blocks() -> None:
    pool, slots, (first, second, third) = with_snapshots("abc")
    slots.share([second])
    pool.allocate(2)  # evicts c, then b
    assert [slots.find(value) for value in names("abc")] == [first, None, None]
    assert (slots.num_evictions, slots.num_snapshots, slots.num_in_use) == (2, 1, 1)
    assert slots.references(second) == 1
    assert third in slots.allocate(2)  # blank by now, so a stays
    assert slots.find(b"a") == first
    slots.release([second])
    slots.check()


def test_blocks_stay_without_their_snapshots() -> None:
    pool, slots, _ = with_snapshots("abc")
    slots.allocate(4)
    assert (slots.num_snapshots, slots.num_evictions, pool.num_evictions) == (0, 3, 0)
    assert len(pool.lookup(names("abc"))) == 3


def test_a_reset_takes_snapshots_along() -> None:
    pool, slots, _ = with_snapshots("abc")
    pool.reset_prefix_cache()
    slots.check()
    assert (slots.num_snapshots, slots.num_free) == (0, 4)


def test_a_snapshot_without_its_block_is_noticed() -> None:
    pool, slots, _ = with_snapshots("abc")
    slots.register(slots.allocate(1)[0], b"z")
    with pytest.raises(PoolError, match="the dependent knows nothing more"):
        pool.check()


# Prefix hashes


def test_the_hash_is_what_we_say_it_is() -> None:
    salt = prefix_salt("model")
    first = blake2b(
        salt + (7).to_bytes(8, "little") + (2**40).to_bytes(8, "little"), digest_size=16
    )
    second = blake2b(first.digest() + bytes(8) + b"\x01" + bytes(7), digest_size=16)
    assert hash_blocks([7, 2**40, 0, 1, 5], 2, salt, []) == [first.digest(), second.digest()]


tokens_lists = st.lists(st.integers(0, 3), max_size=24)


@given(tokens_lists, st.integers(0, 24), st.integers(1, 5))
def test_extending_equals_hashing_at_once(tokens: list[int], cut: int, block_size: int) -> None:
    salt = prefix_salt("model")
    whole = hash_blocks(tokens, block_size, salt, [])
    head = hash_blocks(tokens[:cut], block_size, salt, [])
    assert len(whole) == len(tokens) // block_size
    assert all(len(value) == HASH_BYTES for value in whole)
    before = list(head)
    assert hash_blocks(tokens, block_size, salt, head) == whole
    assert head == before


@given(tokens_lists, tokens_lists, st.integers(1, 3))
def test_equal_hash_means_equal_prefix(one: list[int], two: list[int], block_size: int) -> None:
    salt = prefix_salt("model")
    chains = [hash_blocks(tokens, block_size, salt, []) for tokens in (one, two)]
    for index, values in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * block_size
        assert (values[0] == values[1]) == (one[:end] == two[:end])


def test_salts_keep_models_and_tenants_apart() -> None:
    salts = [
        prefix_salt("ab"),
        prefix_salt("ab", ""),
        prefix_salt("ab", "c"),
        prefix_salt("a", "bc"),
        prefix_salt("a", "None"),
        prefix_salt("a"),
    ]
    chains = {tuple(hash_blocks([1, 2, 3, 4], 2, salt, [])) for salt in salts}
    assert len(chains) == len(salts)
    assert len({value for chain in chains for value in chain}) == 2 * len(salts)


def test_a_placeholder_is_never_hashed() -> None:
    with pytest.raises(struct.error):
        hash_blocks([1, -1], 2, prefix_salt("model"), [])


# The pool against a model that is too simple to be wrong


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds what, and the released contents in order of release."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 4, True)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.released: list[int] = []  # with contents, least recent first

    def references(self, block_id: int) -> int:
        return sum(ids.count(block_id) for ids in self.held)

    @rule(target=holders, count=st.integers(0, 4))
    def allocate(self, count: int) -> list[int]:
        if count > self.pool.num_free:
            with pytest.raises(PoolError):
                self.pool.allocate(count)
            count = 0
        num_evicted = max(0, count - (self.pool.num_free - len(self.released)))
        evicted, self.released = self.released[:num_evicted], self.released[num_evicted:]
        for block_id in evicted:
            del self.contents[block_id]
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count
        assert not any(self.references(block_id) for block_id in ids)
        assert set(ids).isdisjoint(self.contents)
        assert set(evicted) <= set(ids)
        self.held.append(ids)
        return ids

    @rule(target=holders, chain=st.lists(st.sampled_from(names("abcdef")), max_size=4))
    def look_up_and_share(self, chain: list[bytes]) -> list[int]:
        by_name = {value: block_id for block_id, value in self.contents.items()}
        expected: list[int] = []
        for value in chain:
            if value not in by_name:
                break
            expected.append(by_name[value])
        ids = self.pool.lookup(chain)
        assert ids == expected
        self.pool.share(ids)
        self.released = [block_id for block_id in self.released if block_id not in ids]
        self.held.append(ids)
        return ids

    @rule(ids=holders, value=st.sampled_from(names("abcdef")))
    def register(self, ids: list[int], value: bytes) -> None:
        for block_id in ids[:1]:
            if self.contents.get(block_id, value) != value:
                with pytest.raises(PoolError):
                    self.pool.register(block_id, value)
                continue
            self.pool.register(block_id, value)
            if value not in self.contents.values():
                self.contents[block_id] = value

    @rule(ids=consumes(holders))
    def release(self, ids: list[int]) -> None:
        self.pool.release(ids)
        self.held = [other for other in self.held if other is not ids]
        for block_id in reversed(ids):
            gone = self.references(block_id) == 0 and block_id not in self.released
            if gone and block_id in self.contents:
                self.released.append(block_id)

    @rule(value=st.sampled_from(names("abcdef")))
    def forget(self, value: bytes) -> None:
        self.pool.forget(value)
        self.contents = {k: v for k, v in self.contents.items() if v != value}
        self.released = [block_id for block_id in self.released if block_id in self.contents]

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.contents.clear()
        self.released.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        counts = [self.references(block_id) for block_id in range(self.pool.num_blocks)]
        assert [self.pool.references(block_id) for block_id in range(8)] == counts
        assert self.pool.num_free == counts[1:].count(0)
        hashes: dict[int, Any] = {block_id: self.pool.hash_of(block_id) for block_id in range(8)}
        assert {k: v for k, v in hashes.items() if v is not None} == self.contents

    def teardown(self) -> None:
        for ids in self.held:
            self.pool.release(ids)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_usable


TestPool = PoolMachine.TestCase
