"""How much of everything: blocks of the paged cache, slots of the state cache, rows and tokens of a
step, from the memory there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from trueline.cache.blocks import most_touched
from trueline.cache.kinds import AnyPagedKind
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.errors import UsageError
from trueline.spec.model import ModelSpec

AUTO_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# Snapshots of states that the prefix cache may keep, and how far apart those of a prompt lie.
SNAPSHOTS_PER_SEAT = 4
AUTO_SPACING = 512
# Prefixes whose last windows the cache may keep, in at most so much of what windows leave.
PREFIXES_PER_SEAT = 4
WINDOWS_SHARE = 0.25
# Set aside for what a step computes before that has been measured.
GPU_WORKSPACE = 4 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold, and how much memory we may take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    overlap: bool
    num_draft_tokens: int = 0
    """That a decode row may carry."""

    @staticmethod
    def of(config: EngineConfig, device: Device, num_draft_tokens: int = 0) -> Limits:
        seqs, tokens, share = (256, 8192, 0.9) if device.is_gpu else (64, 2048, 0.5)
        seqs = seqs if config.max_num_seqs is None else config.max_num_seqs
        if config.max_num_batched_tokens is None:
            tokens = max(tokens, seqs)
        else:
            tokens = config.max_num_batched_tokens
        if config.gpu_memory_utilization is not None:
            share = config.gpu_memory_utilization
        overlap = device.is_gpu if config.overlap is None else config.overlap
        return Limits(seqs, tokens, share, overlap, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a GPU, after the weights have been loaded."""

    used: int
    """By anybody, weights included."""
    workspace: int
    """What the largest steps need beside them."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots of what is kept per sequence: one for each that runs, the others for snapshots."""

    num_slots: int
    slot_bytes: int
    spacing: int
    """Tokens between the snapshots of a long prompt."""

    def __str__(self) -> str:
        return (
            f"{self.num_slots * self.slot_bytes / 1e6:,.1f} MB: {self.num_slots} of "
            f"{self.slot_bytes / 1e6:,.2f} MB, a snapshot every {self.spacing} tokens"
        )


def cache_budget(
    config: EngineConfig, device: Device, limits: Limits, weights: int, measured: Measured | None
) -> int:
    """Bytes for blocks and slots."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if not device.is_gpu:
        return int((device.free_memory - weights) * limits.memory_share)
    if measured is None:
        used = device.total_memory - device.free_memory + weights
        measured = Measured(used, GPU_WORKSPACE)
    return int(device.total_memory * limits.memory_share) - measured.used - measured.workspace


def slot_plan(
    slot_bytes: int, config: EngineConfig, block_size: int, budget: int, limits: Limits
) -> SlotPlan:
    """A slot for every sequence and each of its drafts, and some for snapshots, in at most half of
    the cache's memory."""
    if config.num_state_slots is not None:
        count = config.num_state_slots
    else:
        snapshots = SNAPSHOTS_PER_SEAT if config.enable_prefix_caching else 0
        each = 1 + limits.num_draft_tokens + snapshots
        count = min(limits.max_num_seqs * each, budget // 2 // slot_bytes - 1)
    if count < 1 + limits.num_draft_tokens:
        raise UsageError(
            f"the states have {budget // 2:,} bytes, one takes {slot_bytes:,} and a spare one is "
            "needed: raise kv_cache_memory_bytes or gpu_memory_utilization, or set num_state_slots"
        )
    spacing = config.snapshot_spacing
    if spacing == "auto":
        spacing = -(-AUTO_SPACING // block_size) * block_size
    return SlotPlan(count + 1, slot_bytes, spacing)


def max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise UsageError(
            f"max_model_len = {config.max_model_len}: the model takes up to {spec.max_position} "
            "(max_position_embeddings)"
        )
    return config.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Paged kinds that share a block table, and how many blocks they have."""

    kinds: tuple[AnyPagedKind, ...]
    num_blocks: int

    @property
    def block_size(self) -> int:
        return self.kinds[0].block_size

    @property
    def window(self) -> int | None:
        return self.kinds[0].window

    @property
    def window_step(self) -> int:
        return self.kinds[0].window_step

    @property
    def keeps_ends(self) -> bool:
        return self.kinds[0].keeps_ends

    @property
    def block_bytes(self) -> int:
        return sum(kind.block_bytes for kind in self.kinds)


def plan_groups(
    kinds: Sequence[AnyPagedKind],
    config: EngineConfig,
    limits: Limits,
    budget: int,
    max_len: int,
) -> tuple[GroupPlan, ...]:
    """As many tokens in every group as all sequences have at full length, or as memory allows;
    where a window bounds what a sequence holds, enough for all and for some prefixes that may be
    reused. One more as null block."""
    together: dict[tuple[int, int | None, int, bool], list[AnyPagedKind]] = {}
    for kind in kinds:
        shared = (kind.block_size, kind.window, kind.window_step, kind.keeps_ends)
        together.setdefault(shared, []).append(kind)
    groups = [GroupPlan(kinds=tuple(members), num_blocks=0) for members in together.values()]
    if config.num_gpu_blocks_override is not None:
        tokens = config.num_gpu_blocks_override * groups[0].block_size
        return tuple(replace(g, num_blocks=-(-tokens // g.block_size) + 1) for g in groups)
    fixed = _in_windows(groups, config, limits, budget, max_len)
    budget -= sum(count * g.block_bytes for g, count in zip(groups, fixed, strict=True))
    return tuple(
        replace(group, num_blocks=count or _by_memory(group, groups, budget, limits, max_len))
        for group, count in zip(groups, fixed, strict=True)
    )


def _in_windows(
    groups: Sequence[GroupPlan], config: EngineConfig, limits: Limits, budget: int, max_len: int
) -> list[int]:
    """Blocks of each group with a window, the null block among them; 0 for one without."""
    whole = lcm(*(group.block_size for group in groups)) if config.enable_prefix_caching else None
    fixed = [_held(group, limits, max_len, whole) if group.window else 0 for group in groups]
    needed = sum(count * g.block_bytes for g, count in zip(groups, fixed, strict=True))
    if needed > budget:
        raise UsageError(
            f"the cache has {budget:,} bytes, and what {limits.max_num_seqs} sequences and a step "
            f"of {limits.max_num_batched_tokens} tokens keep in windows takes {needed:,}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or lower max_num_seqs or "
            "max_num_batched_tokens"
        )
    if not config.enable_prefix_caching:
        return fixed
    ends = PREFIXES_PER_SEAT * limits.max_num_seqs
    reused = [ends * _after_prefix(group) for group in groups]
    wanted = sum(count * g.block_bytes for g, count in zip(groups, reused, strict=True))
    share = min(1.0, (budget - needed) * WINDOWS_SHARE / max(wanted, 1))
    return [
        min(count + int(more * share), _full(group, limits, max_len)) if count else 0
        for group, count, more in zip(groups, fixed, reused, strict=True)
    ]


def _after_prefix(group: GroupPlan) -> int:
    """Blocks behind a prefix that the next token reads: it ends where all windows are complete."""
    return -(-(group.window - group.window_step) // group.block_size) if group.window else 0


def _held(group: GroupPlan, limits: Limits, max_len: int, whole: int | None) -> int:
    """Blocks that all sequences may hold at a time, and those of a step's tokens. `whole`: in
    multiples of how many tokens prefixes are reused, if they are."""
    assert group.window is not None
    steps = 2 if limits.overlap else 1
    tokens = limits.max_num_batched_tokens * steps
    each = -(-group.window // group.block_size) + 2
    count = limits.max_num_seqs * each - (-tokens // group.block_size) + 1
    if group.keeps_ends:
        count = min(count, _held_ends(group, limits, steps, whole))
    return min(count, _full(group, limits, max_len))


def _held_ends(group: GroupPlan, limits: Limits, steps: int, whole: int | None) -> int:
    """Of all sequences what their next tokens read and write. Of the tokens of a step what is read
    after prefixes, and what one row that goes on with a prompt has read: the budget cuts one."""
    assert group.window is not None
    reach = group.block_size, group.window, group.window_step
    each = most_touched(*reach, steps * (1 + limits.num_draft_tokens))
    count = limits.max_num_seqs * each + 2 * steps * most_touched(*reach) + 1
    if whole is not None:
        count += steps * (limits.max_num_batched_tokens // whole + 1) * _after_prefix(group)
    return count


def _full(group: GroupPlan, limits: Limits, max_len: int) -> int:
    """What all sequences have at full length."""
    return limits.max_num_seqs * -(-max_len // group.block_size) + 1


def _by_memory(
    group: GroupPlan, groups: Sequence[GroupPlan], budget: int, limits: Limits, max_len: int
) -> int:
    """Of the groups without a window each holds as many tokens as the others."""
    full = [each for each in groups if each.window is None]
    stride = lcm(*(each.block_size for each in full))
    step = sum(each.block_bytes * stride // each.block_size for each in full)
    fits = budget * stride // step // group.block_size
    if fits < 2:
        raise UsageError(
            f"the cache has {budget:,} bytes, one block takes {group.block_bytes:,}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return min(fits, _full(group, limits, max_len))
