"""Models with a state per sequence beside the paged cache, in the running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spread import diagonal
from trueline import LLM, SamplingParams
from trueline.cache.kinds.lightning import LightningState
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.verify.cases import CASES, make_subject
from trueline.verify.engine import (
    Ask,
    EngineRun,
    decode_is_prefill,
    oracle,
    run,
    same,
    same_bits_under,
    serve,
)
from trueline.verify.failed import CheckFailed
from trueline.verify.ranks import ranks_are_as_one
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
FAMILY = "bailing_moe_v2_5"
BASE = EngineConfig(max_model_len=400, max_num_seqs=7, num_gpu_blocks_override=600, block_size=16,
                    snapshot_spacing=48)  # fmt: skip
INVARIANT = replace(BASE, batch_invariant=True)

# One-token prompts, one that ends at a block, and one beyond the tiles of 64 and 256.
MIXED = [
    Ask(prompt(40), 10),
    Ask(prompt(1), 12, arrives=1),
    Ask(prompt(16), 9, arrives=2),
    Ask(prompt(310), 6, arrives=3),
    Ask(prompt(3), 70, arrives=3),
    Ask(prompt(1, 1), 3, arrives=9),
]


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    """Few layers, of each kind; whole ones in test_every_variant_equals_the_reference."""
    return tiny(FAMILY, keys={"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def whole(model: Path) -> EngineRun:
    return run(model, MIXED, BASE, enable_prefix_caching=False)


@pytest.mark.parametrize(("budget", "block_size"), diagonal([1, 2, 7, 64], [3, 16, 1]))
def test_every_position_equals_the_reference(
    budget: int, block_size: int, model: Path, whole: EngineRun
) -> None:
    done = run(model, MIXED, BASE, max_num_batched_tokens=budget, max_num_seqs=min(budget, 7),
               block_size=block_size)  # fmt: skip
    oracle(model, MIXED, done)
    same("chunks", done, whole)
    done.core.pool.check()
    assert done.core.slots is not None
    done.core.slots.check()


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("ling")])
def test_every_variant_equals_the_reference(case: str, tmp_path: Path) -> None:
    subject = make_subject(case, tmp_path / case)
    asks = [Ask(prompt(70), 4), Ask(prompt(1), 8, arrives=1), Ask(prompt(20), 3, arrives=1)]
    config = replace(BASE, facts=subject.facts, dtype="float32")
    oracle(subject.model, asks, run(subject.model, asks, config, max_num_batched_tokens=32))


SCHEDULES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 8},
    "one seat": {"max_num_seqs": 1},
    "poison": {"poison": True, "block_size": 3},
    "poison, split": {"poison": True, "max_num_batched_tokens": 9},
    "one step ahead": {"overlap": True},
    "one step ahead, poison": {"overlap": True, "poison": True, "max_num_batched_tokens": 40},
    "few slots": {"num_state_slots": 2, "poison": True},
    "one slot": {"num_state_slots": 1},
    "tight": {"num_gpu_blocks_override": 42, "block_size": 8, "max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree(name: str, model: Path, whole: EngineRun) -> None:
    same(name, run(model, MIXED, BASE, **SCHEDULES[name]), whole)


SOME = ("split", "one step ahead, poison", "few slots", "tight")


@pytest.mark.parametrize("names", [SOME, pytest.param(SCHEDULES, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_schedule(names: Sequence[str], model: Path) -> None:
    same_bits_under(model, MIXED, INVARIANT, {name: SCHEDULES[name] for name in names})


def test_without_the_mode_bits_do_differ(model: Path, whole: EngineRun) -> None:
    """Or the check above could not fail."""
    with pytest.raises(CheckFailed, match="bits differ"):
        same("split", run(model, MIXED, BASE, max_num_batched_tokens=8), whole, bitwise=True)


def test_decode_is_prefill(model: Path) -> None:
    for config in (BASE, INVARIANT):
        decode_is_prefill(model, Ask(prompt(50, 4), 90), config)


@pytest.mark.parametrize(("config", "caching"), diagonal([BASE, INVARIANT], [False, True]))
def test_preempted_requests_resume(config: EngineConfig, caching: bool, model: Path) -> None:
    asks = [Ask(prompt(30, i), 40) for i in range(4)]
    free = run(model, asks, config)
    tight = run(model, asks, config, num_gpu_blocks_override=18, block_size=8,
                max_num_batched_tokens=64, enable_prefix_caching=caching,
                snapshot_spacing=16)  # fmt: skip
    assert tight.core.scheduler.counters.num_preemptions > 0
    same("preempt and resume", tight, free, bitwise=config.batch_invariant)
    assert tight.core.slots is not None
    assert tight.core.slots.num_in_use == 0


@pytest.mark.parametrize("config", [BASE, INVARIANT], ids=["free", "invariant"])
def test_a_prefix_hit_is_as_a_cold_start(config: EngineConfig, model: Path) -> None:
    """Hits end where a snapshot is: at the last block of a prompt, at multiples of the spacing."""
    head = prompt(150, 7)
    asks = [
        Ask(head, 4),
        Ask([*head, 1, 2], 6, arrives=8),  # the whole prompt again
        Ask([*head[:120], 5, 6, 7], 5, arrives=8),  # shorter: not the last state, that at 96
        Ask([*head[:60], 3], 5, arrives=8),
        Ask(head[:40], 5, arrives=8),  # blocks are there, a snapshot is not
    ]
    warm = run(model, asks, config)
    cold = run(model, asks, config, enable_prefix_caching=False)
    assert warm.cached == [0, 144, 96, 48, 0]
    assert cold.cached == [0] * 5
    same("prefix hit", warm, cold, bitwise=config.batch_invariant)
    oracle(model, asks, warm)


@pytest.mark.parametrize("config", [BASE, INVARIANT], ids=["free", "invariant"])
def test_a_second_turn_hits_its_own_answer(config: EngineConfig, model: Path) -> None:
    first = Ask(prompt(20, 3), 50)
    core = load_engine(model, config).core
    answer = serve(core, [first]).tokens[0]
    second = Ask([*first.prompt, *answer, 9, 8, 7], 5)
    warm = serve(core, [second])
    assert warm.cached == [64]  # 69 positions are written: four full blocks of 16
    same("second turn", warm, run(model, [second], config), bitwise=config.batch_invariant)


def test_steady_state_with_few_slots(model: Path) -> None:
    """More than 200 requests through 8 slots; the same probe before and after."""
    core = load_engine(model, replace(BASE, num_state_slots=8, num_gpu_blocks_override=60)).core
    probe = Ask(prompt(70, 5), 10)
    before = serve(core, [probe])
    for turn in range(30):
        asks = [Ask(prompt(1 + (11 * i + turn) % 60, turn), 1 + i, arrives=i) for i in range(7)]
        serve(core, asks)
    assert core.scheduler.counters.num_finished > 200
    assert core.slots is not None
    assert core.slots.num_evictions > 0
    same("steady state", serve(core, [probe]), before)
    core.slots.check()


def test_abort_frees_slots_and_disturbs_nobody(model: Path) -> None:
    asks = [Ask(prompt(60, 1), 20), Ask(prompt(30, 2), 20)]
    alone = run(model, asks[1:], BASE)

    def abort(core: Any, step: int) -> None:
        if step == 6:
            core.abort("check-0")

    core = load_engine(model, BASE).core
    done = serve(core, asks, on_step=abort)
    same("abort", EngineRun(done.tokens[1:], done.logits[1:], [0], [[]], core), alone)
    assert core.slots is not None
    assert core.slots.num_in_use == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_of_one_prompt(overlap: bool, model: Path) -> None:
    llm = LLM(model, skip_tokenizer_init=True, overlap=overlap, max_model_len=400)
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    request = {"prompt_token_ids": prompt(40)}
    copies = llm.generate([request], params, use_tqdm=False)[0].outputs
    tokens = {tuple(output.token_ids) for output in copies}
    assert len(tokens) == 3
    again = llm.generate([request], params, use_tqdm=False)[0].outputs
    assert {tuple(output.token_ids) for output in again} == tokens  # now from snapshots


DIVISIBLE = {"num_attention_heads": 12, "hidden_size": 80, "num_experts": 16,
             "intermediate_size": 88, "moe_shared_expert_intermediate_size": 28,
             "moe_intermediate_size": 24,
             "vocab_size": 312, "num_hidden_layers": 4}  # fmt: skip
ON_RANKS = [Ask(prompt(70), 4), Ask(prompt(7), 4, arrives=1), Ask(prompt(1), 6, arrives=2)]


# One head, one group of the norm and three channels of the shared expert a rank.
EIGHT_RANKS = {"num_attention_heads": 8, "group_norm_size": 8,
               "moe_shared_expert_intermediate_size": 24}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "division"), diagonal([BASE, INVARIANT], [({}, 2, 4), (EIGHT_RANKS, 8)])
)
def test_ranks_are_as_one(config: EngineConfig, division: tuple[Any, ...], tiny: Tiny) -> None:
    keys, *sizes = division
    ranks_are_as_one(tiny(FAMILY, keys=DIVISIBLE | keys), ON_RANKS, config, *sizes)


@pytest.mark.parametrize(
    "keys",
    [
        {"linear_silu": True, "use_qk_norm": False},
        {"linear_rope": False, "q_lora_rank": None},
        {"norm_head": True},
        {"tie_word_embeddings": True},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_every_variant_has_the_bits_of_one_rank(keys: dict[str, Any], tiny: Tiny) -> None:
    ranks_are_as_one(tiny(FAMILY, keys=DIVISIBLE | keys), ON_RANKS, INVARIANT, 4)


@pytest.mark.parametrize(
    "op", ["lightning", "qkv_prepare", "gated_norm", "rope", "rms_norm", "linear"]
)
def test_ops_can_be_their_references(op: str, model: Path) -> None:
    asks = [Ask(prompt(70), 3), Ask(prompt(5), 3, arrives=1)]
    oracle(model, asks, run(model, asks, BASE, ops={op: "reference"}))


def test_the_state_is_kept_in_the_dtype_asked_for(model: Path, whole: EngineRun) -> None:
    default = load_engine(model, BASE)
    assert default.plan.kind(LightningState).dtype == torch.float32
    lines = "\n".join(default.plan.lines())
    assert "MB a slot in float32" in lines
    assert "a snapshot every 48 tokens" in lines
    rounded = run(model, MIXED, BASE, mamba_cache_dtype="bfloat16")
    view = rounded.core.executor.runner.caches.first(LightningState)
    assert view.state.dtype == torch.bfloat16
    with pytest.raises(CheckFailed):  # and the gate sees it
        same("bfloat16 state", rounded, whole)
    auto = load_engine(model, replace(BASE, mamba_cache_dtype="auto", dtype="bfloat16"))
    assert auto.plan.kind(LightningState).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"snapshot_spacing": 17}, "multiple of block_size=16"),
        ({"num_state_slots": 0}, "num_state_slots = 0: accepted"),
        ({"mamba_cache_dtype": "fp8"}, "mamba_cache_dtype = 'fp8': accepted"),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 30_000}, "num_state_slots"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], part: str, model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_engine(model, replace(BASE, **changes))
    assert part in str(caught.value)


def test_slots_are_part_of_the_memory_plan(tiny: Tiny) -> None:
    plan = load_engine(
        tiny(FAMILY), replace(BASE, num_gpu_blocks_override=None, kv_cache_memory_bytes=2_000_000)
    ).plan
    assert plan.slots is not None
    states = plan.slots.num_slots * plan.slots.slot_bytes
    assert states <= 1_000_000
    assert states + plan.cache_bytes <= 2_000_000
