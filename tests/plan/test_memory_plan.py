"""How much of everything: arithmetic on a plan, of models that nobody loads."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trueline.config import EngineConfig
from trueline.device import Device
from trueline.engine import memory
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.memory import Limits, Measured, cache_budget, plan_groups
from trueline.plan.plan import make_plan
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec
from trueline.tiny.configs import family_config

CPU = Device(kind="cpu", name="some", threads=2, free_memory=1 << 30, total_memory=1 << 30)
GPU = Device(kind="cuda", name="some", threads=1, free_memory=60 << 30, total_memory=80 << 30)
BASE = EngineConfig(max_model_len=400, max_num_seqs=5, block_size=16, canary_interval=0)


@pytest.fixture
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(family_config(request.param) | {"torch_dtype": "float32"}))
    return read_model(file)


LATENT, SPARSE, HYBRID = "deepseek_v3", "glm_moe_dsa", "bailing_moe_v2_5"


@pytest.mark.parametrize("spec", [LATENT, HYBRID], indirect=True)
def test_what_is_asked_for_is_usable(spec: ModelSpec) -> None:
    """The null block and the null slot come on top."""
    config = replace(BASE, num_gpu_blocks_override=37, num_state_slots=9)
    plan = make_plan(spec, config, CPU)
    assert plan.num_blocks == 38
    assert any("38 blocks of 16 positions (592 tokens)" in line for line in plan.lines())
    assert plan.slots is None or plan.slots.num_slots == 10


@pytest.mark.parametrize("spec", [LATENT, SPARSE, HYBRID], indirect=True)
def test_every_sequence_at_full_length_and_no_more(spec: ModelSpec) -> None:
    plan = make_plan(spec, BASE, CPU)
    assert plan.num_blocks == 5 * 400 // 16 + 1
    if plan.slots is not None:  # a seat each, and four snapshots for every seat
        assert plan.slots.num_slots == 5 * 5 + 1
        without = make_plan(spec, replace(BASE, enable_prefix_caching=False), CPU)
        assert without.slots is not None
        assert without.slots.num_slots == 5 + 1


@pytest.mark.parametrize("spec", [LATENT, SPARSE, HYBRID], indirect=True)
def test_bytes_are_those_of_every_layer(spec: ModelSpec) -> None:
    plan = make_plan(spec, BASE, CPU)
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MLASpec)]
    each = sum(4 * (mixer.kv_lora_rank + mixer.qk_rope_head_dim) for mixer in mixers)
    each += sum(4 * m.indexer.head_dim for m in mixers if m.indexer and not m.indexer.shared)
    assert plan.cache_bytes == plan.num_blocks * 16 * each
    # memory for so many blocks and a bit is memory for so many blocks
    state = plan.slots.num_slots * plan.slots.slot_bytes if plan.slots else 0
    tight = replace(BASE, kv_cache_memory_bytes=state + 11 * 16 * each + 5)
    if plan.slots is None:
        assert make_plan(spec, tight, CPU).num_blocks == 11


@pytest.mark.parametrize("spec", [HYBRID], indirect=True)
def test_states_take_at_most_half(spec: ModelSpec) -> None:
    whole = make_plan(spec, BASE, CPU).slots
    assert whole is not None
    few = make_plan(spec, replace(BASE, kv_cache_memory_bytes=2 * 7 * whole.slot_bytes), CPU).slots
    assert few is not None
    assert few.num_slots == 7
    widest = make_plan(spec, replace(BASE, mamba_cache_dtype="auto", dtype="bfloat16"), GPU)
    (kind,) = widest.slotted
    assert kind.dtype.itemsize == 2
    assert 2 * kind.slot_bytes == whole.slot_bytes


def test_budget() -> None:
    limits = Limits(8, 64, 0.5, overlap=False)
    assert cache_budget(EngineConfig(kv_cache_memory_bytes=123), GPU, limits, 7, None) == 123
    assert cache_budget(EngineConfig(), CPU, limits, 1 << 20, None) == ((1 << 30) - (1 << 20)) // 2
    # of a GPU the share counts what others have too; before anything is measured, 4 GiB to work in
    assert cache_budget(EngineConfig(), GPU, limits, 1 << 30, None) == (40 - 20 - 1 - 4) << 30
    measured = Measured(30 << 30, 3 << 30)
    assert cache_budget(EngineConfig(), GPU, limits, 1 << 30, measured) == (40 - 30 - 3) << 30


def test_limits_of_devices() -> None:
    assert Limits.of(EngineConfig(), CPU) == Limits(64, 2048, 0.5, overlap=False)
    assert Limits.of(EngineConfig(), GPU) == Limits(256, 8192, 0.9, overlap=True)
    # a step has a token for every running request, unless somebody says otherwise
    assert Limits.of(EngineConfig(max_num_seqs=4000), CPU).max_num_batched_tokens == 4000
    asked = EngineConfig(max_num_batched_tokens=33, gpu_memory_utilization=0.25, overlap=True)
    assert Limits.of(asked, CPU) == Limits(64, 33, 0.25, overlap=True)


@pytest.mark.parametrize("spec", [HYBRID], indirect=True)
def test_spacing_is_a_multiple_of_the_block(spec: ModelSpec) -> None:
    for size, spacing in ((16, 512), (48, 528), (600, 600)):
        state = make_plan(spec, replace(BASE, block_size=size), CPU).slots
        assert state is not None
        assert state.spacing == spacing


@dataclass(frozen=True)
class Paged:
    """As much of a kind as is planned with."""

    block_size: int
    block_bytes: int
    window: int | None = None
    window_step: int = 1
    keeps_ends: bool = False


LIMITS = Limits(3, 20, 0.5, overlap=False)


def test_groups_hold_as_many_tokens_as_each_other() -> None:
    kinds = [Paged(4, 40), Paged(6, 30), Paged(4, 8)]
    # per token (40 + 8) / 4 + 30 / 6 = 17 bytes; for 3 sequences of 50 tokens there is enough
    for budget, tokens in ((17 * 120, 120), (17 * 48, 48)):
        first, second = plan_groups(kinds, EngineConfig(), LIMITS, budget, 50)
        assert first.kinds == (kinds[0], kinds[2])
        assert (first.num_blocks, second.num_blocks) == (tokens // 4, tokens // 6)
        assert sum(g.num_blocks * g.block_bytes for g in (first, second)) <= budget
    first, second = plan_groups(kinds, EngineConfig(), LIMITS, 10**9, 50)
    assert (first.num_blocks, second.num_blocks) == (3 * 13 + 1, 3 * 9 + 1)


def test_a_window_has_enough_for_all_sequences() -> None:
    """Whatever it holds comes first; the others share the rest."""
    kinds = [Paged(4, 40), Paged(2, 10, window=5)]
    cold = EngineConfig(enable_prefix_caching=False)
    full, window = plan_groups(kinds, cold, LIMITS, 2000, 10_000)
    # a window of 5 touches 3 blocks of 2 and may begin anywhere; a step brings 20 tokens
    held = 3 * (3 + 2) + 20 // 2 + 1
    assert window.num_blocks == held
    assert full.num_blocks == (2000 - 10 * held) // 40
    # with overlap two steps are in flight
    both = plan_groups(kinds, cold, replace(LIMITS, overlap=True), 2000, 10_000)
    assert both[1].num_blocks == held + 20 // 2
    # no more than all sequences at full length: 3 times 7 tokens
    assert plan_groups(kinds, cold, LIMITS, 2000, 7)[1].num_blocks == 3 * 4 + 1
    with pytest.raises(UsageError, match="one block takes 40"):
        plan_groups(kinds, cold, LIMITS, 10 * held + 79, 50)
    with pytest.raises(UsageError, match=f"takes {10 * held}: raise .* lower max_num_seqs"):
        plan_groups(kinds, cold, LIMITS, 10 * held - 1, 50)


def test_windows_of_prefixes_take_a_share_of_the_rest() -> None:
    """Four prefixes a seat, each with what is read after it; nothing where windows begin anew."""
    kinds = [Paged(4, 40), Paged(2, 10, window=5), Paged(6, 7, 6, 3), Paged(3, 5, 3, 3)]
    held = (26, 3 * 3 + 4 + 1, 3 * 3 + 7 + 1)
    for budget, share in ((10**6, 1.0), (1200, None)):
        full, *windows = plan_groups(kinds, EngineConfig(), LIMITS, budget, 10_000)
        left = budget - 26 * 10 - held[1] * 7 - held[2] * 5
        part = min(1.0, left * 0.25 / (12 * (2 * 10 + 7)))
        assert share is None or part == share
        assert [g.num_blocks for g in windows] == [
            held[0] + int(24 * part), held[1] + int(12 * part), held[2]
        ]  # fmt: skip
        assert full.num_blocks * 40 + sum(g.num_blocks * g.block_bytes for g in windows) <= budget


def test_of_a_chunk_s_tails_the_ends_have_blocks() -> None:
    """As DeepSeek-V4's compressors: of 8,192 tokens what is read after each 128, and the open
    windows of all sequences, twice where two steps are in flight."""
    kinds = [Paged(128, 40), Paged(8, 10, 8, 4, keeps_ends=True), Paged(128, 9, 128, 128, True)]
    limits = Limits(16, 8192, 0.5, overlap=False)
    cold = EngineConfig(enable_prefix_caching=False)
    _, overlapping, whole = plan_groups(kinds, cold, limits, 10**9, 1 << 20)
    # a window of 8 that moves by 4 touches 2 blocks of 8; one of 128 in blocks of 128 is one
    assert (overlapping.num_blocks, whole.num_blocks) == (16 * 2 + 2 * 2 + 1, 16 + 2 + 1)
    both = plan_groups(kinds, cold, replace(limits, overlap=True), 10**9, 1 << 20)
    assert [group.num_blocks for group in both[1:]] == [16 * 2 + 4 * 2 + 1, 16 * 2 + 4 + 1]
    _, overlapping, whole = plan_groups(kinds, EngineConfig(), limits, 10**9, 1 << 20)
    prefixes = 8192 // 128 + 1
    assert overlapping.num_blocks == 16 * 2 + 2 * 2 + prefixes + 1 + 4 * 16  # four a seat, to reuse
    assert whole.num_blocks == 16 + 2 + 1, "after whole windows nothing is read"
    # never more than if all were kept
    few = plan_groups(kinds, cold, replace(limits, max_num_batched_tokens=8), 10**9, 1 << 20)
    assert few[1].num_blocks == 16 * 2 + 2 * 2 + 1


def test_what_is_asked_for_counts_blocks_of_the_first_group() -> None:
    kinds = [Paged(4, 40), Paged(2, 10, window=5), Paged(3, 1)]
    chosen = EngineConfig(num_gpu_blocks_override=7)
    assert [g.num_blocks for g in plan_groups(kinds, chosen, LIMITS, 0, 50)] == [8, 15, 11]


@pytest.mark.parametrize("spec", [LATENT, SPARSE, HYBRID], indirect=True)
@pytest.mark.parametrize("drafts", [0, 3])
def test_made_up_steps_are_such_as_may_come(spec: ModelSpec, drafts: int) -> None:
    """No position beyond the longest sequence, no null block or slot, a block for each position."""
    plan = make_plan(spec, BASE, CPU, num_draft_tokens=drafts)
    batches = [
        memory._decode(plan),
        *(memory._prefill(plan, most) for most in memory._contexts(plan)),
        memory.made_up_batch(plan, [(40, 1), (0, 30)], num_drafts=drafts, spread=True),
    ]
    assert max(batches[0].positions) == plan.max_model_len - 1
    assert len(batches[0].samples) == BASE.max_num_seqs * (1 + drafts)
    for batch in batches:
        assert max(batch.positions) < plan.max_model_len
        for row in batch.rows:
            for group, table in zip(plan.groups, row.tables, strict=True):
                assert len(table) == -(-(row.start + row.count) // group.block_size)
                assert all(0 < block < group.num_blocks for block in table)
            assert row.state is None or (plan.slots and 0 < row.state.slot < plan.slots.num_slots)
