"""Which slot of the state cache a request works in, and which of its states are kept. No torch.

A mixer with a recurrent state keeps no rows to share: after n tokens there is one state, and the
state after fewer cannot be had from it. So a request works in a slot of its own, from admission
until its blocks go back, and the steps copy some of its states aside, as *snapshots*: to slots that
are known, once written, by the hash of the block that ends there. A request that starts with the
same tokens starts from the longest prefix for which there are both the blocks and a snapshot.

**Which states are kept.** All at block boundaries, and only where the blocks are registered too:
every `spacing` tokens; the last boundary of a prompt that a repetition could use; and, beyond the
prompt, the last boundary reached, which takes the place of the one before: so a chat finds its own
answer again, and a long answer does not fill the pool.

**Drafts.** Where rows may carry k drafts, a request has k slots beside its own: a row writes the
state after each of its tokens to a slot, and the one after the last accepted token becomes its own.

**Who gets a slot.** Admissions before snapshots: a snapshot takes what is left, and is left out
where nothing is. Snapshots nobody holds are free slots, the least recently used first to go. Where
the snapshot to start from is the last free slot, the request goes on in it, and it is lost to
others. A snapshot is forgotten with its block, without which nobody could start from it.

**When a slot is free again.** Steps execute in the order of scheduling, so a slot may be given to
a later step while an earlier one may still read or write it: the later one writes it afterwards,
and reads it only after writing it itself or, by hash, after the writing step was collected. A
preempted request therefore gives back all it holds at once, snapshots in flight included; what its
steps in flight still write there is never registered. Otherwise slots go the way of blocks: a
snapshot is held, by those who write it and those who start from it, until their step is collected,
and an ended request keeps its slots until its last step is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trueline.cache.groups import BlockGroups
from trueline.cache.slots import SlotPool, StateSlots
from trueline.engine.request import Request
from trueline.engine.step import Row
from trueline.errors import UsageError


@dataclass(slots=True)
class Held:
    """The slots of one admission of a request."""

    slot: int
    drafts: list[int] = field(default_factory=list)
    """Of a row with drafts: for the states after all its tokens but the last, whose state goes to
    `slot`."""
    source: tuple[int, int] | None = None
    """(tokens, slot): the snapshot it starts from, until the step that reads it is collected."""
    snapshots: list[int] = field(default_factory=list)
    """Being written by steps in flight."""
    latest: bytes | None = None
    """The snapshot that goes when the next is there."""

    def all(self) -> list[int]:
        return [
            *(self.slot, *self.drafts, *self.snapshots),
            *([self.source[1]] if self.source else []),
        ]


class States:
    """What the scheduler does with slots, at each point of a request's life."""

    def __init__(
        self, groups: BlockGroups, slots: SlotPool, spacing: int | None, num_drafts: int = 0
    ) -> None:
        if spacing is not None and (spacing < 1 or spacing % groups.lcm_block_size):
            raise UsageError(
                f"snapshot_spacing={spacing}: it must be a multiple of "
                f"block_size={groups.lcm_block_size}, because a prefix is found by its blocks"
            )
        self.groups = groups
        self.blocks = groups.main
        self.slots = slots
        self.spacing = spacing
        self.num_drafts = num_drafts
        self._held: dict[Request, Held] = {}
        self.blocks.dependent = slots

    def held(self, request: Request) -> list[int]:
        """All slots it holds, its own first."""
        return self._held[request].all() if request in self._held else []

    def has_room(self) -> bool:
        """One more request can be seated."""
        return self.slots.num_free > self.num_drafts

    def usable(self, request: Request, num_tokens: int) -> int:
        """Of a prefix that was found, the tokens up to the last snapshot."""
        size = self.groups.lcm_block_size
        for end in range(num_tokens // size * size, 0, -size):
            if self.slots.find(self._hash(request, end)) is not None:
                return end
        return 0

    def seat(self, request: Request) -> None:
        """Slots of its own, and a hold on the snapshot it starts from, if any."""
        start, needed = request.num_computed, 1 + self.num_drafts
        if start == 0:
            slot, *drafts = self.slots.allocate(needed)
            self._held[request] = Held(slot, drafts)
            return
        value = self._hash(request, start)
        snapshot = self.slots.find(value)
        assert snapshot is not None, "a hit ends where a snapshot is"
        self.slots.share([snapshot])  # first, or allocating could evict it
        if self.slots.num_free >= needed:
            slot, *drafts = self.slots.allocate(needed)
            self._held[request] = Held(slot, drafts, (start, snapshot))
        else:
            self.slots.evict(value)
            self._held[request] = Held(snapshot, self.slots.allocate(needed - 1))

    def give_back(self, request: Request) -> None:
        if request in self._held:
            self.slots.release(self._held.pop(request).all())

    # A row goes out

    def row_state(self, request: Request, start: int, end: int, num_drafts: int = 0) -> StateSlots:
        held = self._held[request]
        snapshots = self._take_snapshots(request, start, end)
        held.snapshots += [slot for _, slot in snapshots]
        drafts = tuple(held.drafts[:num_drafts])
        return StateSlots(held.slot, self._source(held, start), snapshots, drafts)

    def _source(self, held: Held, start: int) -> int | None:
        if start == 0:
            return None
        if held.source and held.source[0] == start:
            return held.source[1]
        return held.slot

    def _take_snapshots(
        self, request: Request, start: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        wanted = self._boundaries(request, start, end) if self._takes_part(request) else []
        # the longest prefixes first, if there are slots for some only
        chosen = wanted[max(0, len(wanted) - self.slots.num_free) :]
        self.slots.num_skipped += len(wanted) - len(chosen)
        return tuple(zip(chosen, self.slots.allocate(len(chosen)), strict=True))

    def _takes_part(self, request: Request) -> bool:
        """What it computes may be registered."""
        pool = self.blocks
        return pool.enable_prefix_caching and request.cache_generation == pool.generation

    def _boundaries(self, request: Request, start: int, end: int) -> list[int]:
        """Numbers of tokens in (start, end] after which the state is worth keeping."""
        last = end // self.groups.lcm_block_size * self.groups.lcm_block_size
        if last <= start:
            return []
        tail = self._tail(request)
        wanted = {
            position for position in (tail, last) if tail <= position and start < position <= end
        }
        if self.spacing:
            wanted.update(range(start - start % self.spacing + self.spacing, end + 1, self.spacing))
        return sorted(wanted)

    def _tail(self, request: Request) -> int:
        """What a repetition of the prompt could skip: whole blocks, and never all of it."""
        size = self.groups.lcm_block_size
        return (request.num_prompt_tokens - 1) // size * size

    # Its step is collected, and its blocks are registered

    def settle(self, row: Row, accepted: int = 0) -> None:
        assert row.state is not None
        held = self._held[row.request]
        if accepted < row.num_drafts:  # the state after the last accepted token is its own now
            held.slot, held.drafts[accepted] = held.drafts[accepted], held.slot
        if held.source:  # read by the first row of an admission, which is this one
            self.slots.release([held.source[1]])
            held.source = None
        for position, slot in row.state.snapshots:
            if position <= row.request.num_written:  # else it is of a rejected draft
                self._register(row.request, held, position, slot)
            held.snapshots.remove(slot)
            self.slots.release([slot])

    def _register(self, request: Request, held: Held, position: int, slot: int) -> None:
        """Its tokens were known before the step was collected, so the hash is there by now, or will
        never be."""
        known = len(request.block_hashes) * self.groups.hash_size
        if not self._takes_part(request) or position > known:
            return
        value = self._hash(request, position)
        self.slots.register(slot, value)
        if self.slots.hash_of(slot) is None:
            return  # somebody else has the same
        if held.latest is not None:
            self.slots.forget(held.latest)
        held.latest = None if self._stays(request, position) else value

    def _stays(self, request: Request, position: int) -> bool:
        spaced = self.spacing is not None and position % self.spacing == 0
        return spaced or position <= self._tail(request)

    def _hash(self, request: Request, position: int) -> bytes:
        return request.block_hashes[position // self.groups.hash_size - 1]
