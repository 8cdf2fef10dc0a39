"""Compressed attention at dims that nobody chose: drawn DeepSeek-V4 models, every position of every
schedule against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drawn_v4 import LONGEST, TYPES, drawn_config, make_drawn
from trueline.engine.loading import load_engine
from trueline.utils.json_types import JSON
from trueline.verify import schedules
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, oracle, run, same, same_bits_under
from trueline.verify.schedules import prompt

QUICK = (3, 5, 7, 10)
"""Seeds of every run of the tests: all forms of layers, 4 to 15 heads, 1 to 4 streams."""


def seeds(count: int, quick: tuple[int, ...], without: tuple[int, ...] = ()) -> list[object]:
    """The others are slow."""
    slow = sorted({*range(count)} - {*quick, *without})
    return [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)]


SEEDS, FEW = seeds(40, QUICK), seeds(12, (7,))
Drawn = Callable[..., Subject]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    made: dict[tuple[int, int], Subject] = {}

    def make(seed: int, ranks: int = 1) -> Subject:
        if (seed, ranks) not in made:
            model = tmp_path_factory.mktemp("drawn") / f"v4-{seed}"
            make_drawn(model, drawn_config(seed, ranks=ranks), seed)
            nothing = torch.empty(0, dtype=torch.long)
            options = {"max_model_len": LONGEST, "num_gpu_blocks_override": LONGEST}
            made[seed, ranks] = Subject(model.name, model, nothing, nothing, options=options)
        return made[seed, ranks]

    return make


def edges(config: JSON) -> list[int]:
    """Lengths of prompts: every residue of both rates, with the window before; the window's edges;
    and one that sees more entries than are chosen."""
    rates, window = config["compress_rates"], config["sliding_window"]
    longest = max(2 * max(rates.values()), window + 1)
    return [*range(1, longest + 2), (config["index_topk"] + 2) * rates[TYPES[1]] + 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_position(seed: int, drawn: Drawn) -> None:
    """Chunks that end inside of windows, NaN in all that nobody owns; and everything at once."""
    subject = drawn(seed)
    lengths = edges(drawn_config(seed))
    asks = [Ask(prompt(n, seed), 3, arrives=n % 4) for n in lengths]
    asks.append(Ask(prompt(7, seed), lengths[-1]))
    config = schedules.base(subject)
    budget, block = 8 + seed % 9, 1 + 2 * seed % 17
    cut = {"max_num_batched_tokens": budget, "block_size": block, "poison": True}
    done = run(subject.model, asks, config, **cut)
    oracle(subject.model, asks, done)
    same("whole", run(subject.model, asks, config, max_num_batched_tokens=512), done)


def test_every_epsilon_is_the_config_s(tmp_path: Path) -> None:
    """Of norms and of hyper-connections: apart, and so large that another one shows anywhere."""
    model = tmp_path / "v4"
    make_drawn(model, drawn_config(7) | {"rms_norm_eps": 0.09, "hc_eps": 0.04}, 7)
    asks = [Ask(prompt(40), 3)]
    oracle(model, asks, run(model, asks, schedules.BASE))


@pytest.mark.parametrize("seed", FEW)
def test_bits_do_not_depend_on_the_schedule(seed: int, drawn: Drawn) -> None:
    subject = drawn(seed)
    config = replace(schedules.base(subject), batch_invariant=True)
    first, *others = edges(drawn_config(seed))[-1:-8:-2]
    asks = [Ask(prompt(first, seed), 9), *(Ask(prompt(n, seed), 4, arrives=1) for n in others)]
    cuts = {
        f"{budget} tokens": {"max_num_batched_tokens": budget, "block_size": size, "poison": True}
        for budget, size in ((8, 3), (9, 16), (13, 1))
    }
    same_bits_under(subject.model, asks, config, cuts)


# 1 has windows of one token alone: nobody reads a prefix, so every one is a hit
@pytest.mark.parametrize("seed", seeds(12, (7,), without=(1,)))
def test_a_prefix_hit_has_the_bits_of_a_cold_run(seed: int, drawn: Drawn) -> None:
    subject = drawn(seed)
    options = subject.options | {"batch_invariant": True, "poison": True, "block_size": 4}
    schedules.prefix_is_cold(replace(subject, options=options), bitwise=True)


def test_a_prefix_may_end_at_every_block_of_entries(drawn: Drawn) -> None:
    """Whatever block_size is: other blocks divide it, so nobody must wait for a common multiple."""
    subject = drawn(7)  # rates 1 and 9: an overlapping window of 2 beside one of 9
    for size in (1, 3, 4, 16, 18, 20):
        config = replace(schedules.base(subject), block_size=size)
        blocks = load_engine(subject.model, config).core.blocks
        assert blocks.lcm_block_size == blocks.main.block_size == 18 * -(-size // 18)


def test_shuffled_keys_of_any_rate(tmp_path: Path) -> None:
    """Whatever block_size is: blocks hold whole groups of them."""
    model = tmp_path / "v4"
    make_drawn(model, drawn_config(7) | {"index_head_dim": 16}, 7)
    asks = [Ask(prompt(60), 5), Ask(prompt(3), 40, arrives=1)]
    config = replace(schedules.BASE, index_cache_layout="shuffled", block_size=4, poison=True)
    oracle(model, asks, run(model, asks, config, max_num_batched_tokens=11))


@pytest.mark.parametrize("seed", FEW)
def test_preempted_requests_resume(seed: int, drawn: Drawn) -> None:
    """Blocks for one request, and hardly for a second. Windows alone never grow."""
    subject = drawn(seed)
    config = replace(schedules.base(subject), max_num_batched_tokens=8, block_size=4, poison=True)
    blocks = load_engine(subject.model, config).core.blocks
    most = 5 + 4 * blocks.lcm_block_size
    asks = [Ask(prompt(5, i), most - 5) for i in range(3)]
    few = max(blocks.most_held(most, 8)) + 2
    tight = run(subject.model, asks, config, num_gpu_blocks_override=few)
    grows = any(pool.window is None for pool in blocks.pools)
    assert bool(tight.core.scheduler.counters.num_preemptions) is grows
    same("preempt = resume", tight, run(subject.model, asks, config))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", FEW)
def test_ranks(seed: int, size: int, drawn: Drawn) -> None:
    schedules.RANK_CHECKS["ranks = one, bitwise"](drawn(seed, size), size)
