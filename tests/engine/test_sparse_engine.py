"""Latent attention over selected positions, in the running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spread import diagonal
from trueline.cache.kinds import index_keys
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.ops.registry import OPS
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
from trueline.verify.graphs import emulated
from trueline.verify.ranks import ranks_are_as_one
from trueline.verify.schedules import base, prompt

Tiny = Callable[..., Path]
FAMILIES = ["deepseek_v32", "glm_moe_dsa"]
BASE = EngineConfig(max_model_len=400, max_num_seqs=7, num_gpu_blocks_override=600, block_size=16)
INVARIANT = replace(BASE, batch_invariant=True)

# Each may see 24 positions: prompts below that, at it, across it while decoding, and far beyond.
MIXED = [
    Ask(prompt(20), 12),
    Ask(prompt(1), 30, arrives=1),
    Ask(prompt(24), 4, arrives=2),
    Ask(prompt(25), 4, arrives=2),
    Ask(prompt(150), 6, arrives=3),
    Ask(prompt(1, 1), 3, arrives=9),
]


# The other shares selections among layers as well; every position of this is in test_engine.py.
ONE_OF_THEM = pytest.param("deepseek_v32", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[ONE_OF_THEM, "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tiny: Tiny) -> Path:
    """Few layers: one after those that share a selection has its own again."""
    return tiny(request.param, keys={"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def whole(model: Path) -> EngineRun:
    return run(model, MIXED, BASE, enable_prefix_caching=False)


@pytest.mark.parametrize(("block_size", "budget"), diagonal([1, 2, 16, 64, 128], [7, 64, 512]))
def test_every_position_equals_the_reference(
    budget: int, block_size: int, model: Path, whole: EngineRun
) -> None:
    done = run(model, MIXED, BASE, max_num_batched_tokens=budget, block_size=block_size)
    oracle(model, MIXED, done)
    same("chunks", done, whole)


# With two index heads rounding decides which of equal scores wins: see test_sparse_ops.py for ties.
VARIANTS = [name for name in CASES if name.startswith(("v32", "glm5")) and name != "v32-ties"]


@pytest.mark.parametrize("case", VARIANTS)
def test_every_variant_equals_the_reference(case: str, tmp_path: Path) -> None:
    subject = make_subject(case, tmp_path / case)
    asks = [Ask(prompt(70), 4), Ask(prompt(22), 8, arrives=1)]
    config = replace(BASE, facts=subject.facts, dtype="float32")
    oracle(subject.model, asks, run(subject.model, asks, config, max_num_batched_tokens=32))


SCHEDULES: dict[str, dict[str, Any]] = {
    "split": {"max_num_batched_tokens": 8},
    "one seat": {"max_num_seqs": 1},
    "poison": {"poison": True, "block_size": 3},
    "poison, split": {"poison": True, "max_num_batched_tokens": 9},
    "one step ahead": {"overlap": True},
    "one step ahead, poison": {"overlap": True, "poison": True, "max_num_batched_tokens": 40},
    "tight": {"num_gpu_blocks_override": 22, "block_size": 8, "max_num_batched_tokens": 64},
    "planar": {"index_cache_layout": "planar", "block_size": 5},
    "shuffled": {"index_cache_layout": "shuffled"},
    "rows of one": {"index_cache_layout": "rows", "block_size": 1},
    "planar of one": {"index_cache_layout": "planar", "block_size": 1},
    "shuffled, poison": {"index_cache_layout": "shuffled", "block_size": 64, "poison": True},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_agree(name: str, model: Path, whole: EngineRun) -> None:
    same(name, run(model, MIXED, BASE, **SCHEDULES[name]), whole)


SOME = ("split", "one step ahead, poison", "tight", "planar", "shuffled")


@pytest.mark.parametrize("names", [SOME, pytest.param(SCHEDULES, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_the_schedule(names: Sequence[str], model: Path) -> None:
    same_bits_under(model, MIXED, INVARIANT, {name: SCHEDULES[name] for name in names})


STORAGES = ["float32", "bfloat16", "float16", "e4m3fn", "e4m3fnuz"]
LAYOUTS = [
    *((kind, size) for size in (1, 2, 64) for kind in ("rows", "planar")),
    *(("shuffled", size) for size in (16, 128)),
]


@pytest.mark.parametrize(("storage", "layout"), diagonal(STORAGES, LAYOUTS))
def test_every_layout_has_the_same_bits(storage: str, layout: tuple[str, int], tiny: Tiny) -> None:
    """At equal storage, wherever the bytes lie."""
    model = tiny("deepseek_v32", keys={"index_head_dim": 32})
    asks = [Ask(prompt(60), 5), Ask(prompt(20), 9, arrives=1)]
    config = replace(INVARIANT, index_cache_dtype=storage)
    first = run(model, asks, config)
    kind, size = layout
    done = run(model, asks, config, index_cache_layout=kind, block_size=size)
    same(f"{kind}, blocks of {size}", done, first, bitwise=True)


def test_decode_is_prefill(model: Path) -> None:
    for config in (BASE, INVARIANT):
        decode_is_prefill(model, Ask(prompt(20, 4), 60), config)


@pytest.mark.parametrize("config", [BASE, INVARIANT], ids=["free", "invariant"])
def test_preempted_requests_resume(config: EngineConfig, model: Path) -> None:
    asks = [Ask(prompt(30, i), 40) for i in range(4)]
    free = run(model, asks, config)
    tight = run(model, asks, config, num_gpu_blocks_override=18, block_size=8,
                max_num_batched_tokens=64)  # fmt: skip
    assert tight.core.scheduler.counters.num_preemptions > 0
    same("preempt and resume", tight, free, bitwise=config.batch_invariant)


@pytest.mark.parametrize("config", [BASE, INVARIANT], ids=["free", "invariant"])
def test_a_prefix_hit_is_as_a_cold_start(config: EngineConfig, model: Path) -> None:
    head = prompt(50, 7)
    asks = [Ask(head, 4), Ask(head, 6, arrives=8), Ask([*head[:35], 5, 6, 7], 5, arrives=8)]
    warm = run(model, asks, config)
    assert warm.cached == [0, 48, 32]
    cold = run(model, asks, config, enable_prefix_caching=False)
    same("prefix hit", warm, cold, bitwise=config.batch_invariant)


def test_steady_state(model: Path) -> None:
    core = load_engine(model, replace(BASE, num_gpu_blocks_override=20, block_size=8)).core
    probe = Ask(prompt(60, 5), 10)
    before = serve(core, [probe])
    for turn in range(25):
        serve(core, [Ask(prompt(40 + i, turn), 10) for i in range(3)])
    assert core.pool.num_evictions > 20
    same("steady state", serve(core, [probe]), before)


@pytest.mark.parametrize(("family", "config"), diagonal(FAMILIES, [BASE, INVARIANT]))
def test_ranks_are_as_one(family: str, config: EngineConfig, tiny: Tiny) -> None:
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    model = tiny(family, keys=keys)
    asks = [Ask(prompt(70), 4), Ask(prompt(7), 4, arrives=1), Ask(prompt(1), 6, arrives=2)]
    ranks_are_as_one(model, asks, config, 2, 4, 8)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op in IndexKeys.ops
        for name in OPS[op]
        if name in ("cpu", "composed", "reference")
    ],
)
def test_ops_can_be_chosen(op: str, name: str, model: Path) -> None:
    asks = [Ask(prompt(70), 3), Ask(prompt(23), 4, arrives=1)]
    done = run(model, asks, BASE, ops={op: name})
    oracle(model, asks, done)
    assert done.core.plan.selections[op].name == name


@pytest.mark.parametrize("limit", [1, 400, 5000])
def test_scores_held_at_a_time(
    limit: int, model: Path, whole: EngineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded; nothing else changes, in batch-invariant mode not a bit."""
    asks = [MIXED[0], MIXED[4]]
    wanted = run(model, asks, INVARIANT)
    monkeypatch.setattr(index_keys, "SCORES_AT_A_TIME", limit)
    same("scores in parts", run(model, asks, INVARIANT), wanted, bitwise=True)
    same("scores in parts", run(model, MIXED, BASE, enable_prefix_caching=False), whole)


def test_choices_can_be_recorded_and_forced(model: Path) -> None:
    asks = [Ask(prompt(60), 4)]
    core = load_engine(model, BASE).core
    core.executor.runner.recorded = []
    first = serve(core, asks)
    recorded = core.executor.runner.recorded
    own = len(core.plan.kind(IndexKeys).layers)
    assert [len(step.positions) for step in recorded] == [own] * 4
    chosen = recorded[0].positions[0]
    assert chosen.shape == (60 - 24, 24)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    again = load_engine(model, BASE).core
    again.executor.runner.forced = list(recorded)
    same("forced", serve(again, asks), first)
    other = load_engine(model, BASE).core
    other.executor.runner.forced = [
        replace(step, positions=[torch.arange(24).expand_as(p) for p in step.positions])
        for step in recorded
    ]
    with pytest.raises(CheckFailed):
        same("other choices", serve(other, asks), first)


def test_fp8_keys_choose_nearly_the_same(model: Path) -> None:
    asks = [Ask(prompt(150), 2)]

    def chosen(storage: str) -> list[torch.Tensor]:
        core = load_engine(model, replace(BASE, index_cache_dtype=storage)).core
        core.executor.runner.recorded = []
        serve(core, asks)
        return core.executor.runner.recorded[0].positions

    exact, rounded = chosen("float32"), chosen("e4m3fn")
    # of the first layer: later ones see what earlier ones changed
    pairs = zip(exact[0].tolist(), rounded[0].tolist(), strict=True)
    overlap = [len(set(a) & set(b)) / 24 for a, b in pairs]
    assert sum(overlap) / len(overlap) >= 0.97
    assert overlap != [1.0] * len(overlap)  # or nothing was rounded


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"index_cache_layout": "shuffled", "block_size": 8}, "multiples of 16"),
        ({"index_cache_layout": "swizzled"}, "accepted: ('rows', 'planar', 'shuffled')"),
        ({"index_cache_dtype": "int8"}, "index cache: storage = 'int8': accepted"),
        ({"ops": {"index_scores": "native"}, "index_cache_dtype": "bfloat16"}, "not bfloat16"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], part: str, model: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_engine(model, replace(BASE, **changes))
    assert part in str(caught.value)


def test_the_plan_tells(model: Path) -> None:
    lines = list(load_engine(model, replace(BASE, index_cache_dtype="e4m3fn")).plan.lines())
    told = next(line for line in lines if line.startswith("selection"))
    assert "the 24 best positions; keys in e4m3fn, layout 'rows'" in told


# -- two block tables per sequence -----------------------------------------------------


@pytest.fixture
def own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index keys in blocks three times as long as those of latents: a group, a pool and a block
    table of their own, from the scheduler to the kernels."""
    of = IndexKeys.of

    def longer(spec: Any, context: Any) -> IndexKeys | None:
        return of(spec, replace(context, block_size=3 * context.block_size))

    monkeypatch.setattr(IndexKeys, "of", longer)


@pytest.mark.usefixtures("own_blocks")
def test_kinds_with_block_tables_of_their_own(model: Path) -> None:
    done = run(model, MIXED, BASE, block_size=4, max_num_batched_tokens=29, poison=True)
    assert [group.block_size for group in done.core.plan.groups] == [4, 12]
    oracle(model, MIXED, done)
    for pool in done.core.blocks.pools:
        pool.check()
        assert pool.num_free == pool.num_usable


@pytest.mark.usefixtures("own_blocks")
def test_prefixes_and_preemption_with_two_tables(model: Path) -> None:
    """A prefix counts in whole blocks of both; then three want more than there are."""
    head = prompt(40, 3)
    asks = [
        Ask([*head, 1], 6),
        Ask([*head, 2, 3], 4, arrives=9),
        *(Ask(prompt(9, i), 30, arrives=20) for i in range(3)),
    ]
    changes = {"block_size": 4, "num_gpu_blocks_override": 18, "max_model_len": 64}
    done = run(model, asks, BASE, **changes)
    assert done.cached[:2] == [0, 36]
    assert done.core.scheduler.counters.num_preemptions
    oracle(model, asks, done)


@pytest.mark.usefixtures("own_blocks")
def test_captured_steps_with_two_tables(tmp_path: Path) -> None:
    subject = make_subject("v32-shallow", tmp_path / "v32")
    config = replace(base(subject), block_size=5, max_num_seqs=4, poison=True)
    asks = [Ask(prompt(9), 4), Ask(prompt(30), 3, arrives=1)]
    captured = serve(emulated(subject, config), asks)
    assert len(captured.core.plan.groups) == 2
    same("two tables", captured, run(subject.model, asks, config))
