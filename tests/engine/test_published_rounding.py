"""Numerics `published` in the running engine: what DeepSeek-V4's own inference code rounds, under
every schedule, from plain, fp4 and fp8 checkpoints, and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.engine.loading import load_engine
from trueline.ops.row_rounding import composed
from trueline.verify.cases import FP4, Subject, make_subject
from trueline.verify.engine import (
    Ask,
    decode_is_prefill,
    oracle,
    run,
    same,
    same_bits_under,
)
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import graph_is_eager
from trueline.verify.numerics import numerics_oracle, published_rounding
from trueline.verify.ranks import ranks_are_as_one, serve_on_ranks
from trueline.verify.schedules import (
    MIXED,
    ON_RANKS,
    base,
    preempted_resumes,
    prefix_is_cold,
    prompt,
)
from trueline.weights.formats import Storage
from trueline.weights.formats.base_fp8 import BaseFp8

Tiny = Callable[..., Path]
DIMS: dict[str, Any] = {
    "head_dim": 154,
    "index_head_dim": 32,
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
}
BASE_FP8 = BaseFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    made = make_subject("v4-rounded", tmp_path_factory.mktemp("rounded") / "model")
    return replace(made, options={"numerics": "published"})


def of(model: Path) -> Subject:
    nothing = torch.empty(0)
    return Subject("published", model, nothing, nothing, options={"numerics": "published"})


@pytest.mark.parametrize("storage", [FP4, BASE_FP8], ids=["fp4", "base fp8"])
def test_every_position_equals_the_reference(storage: Storage, tiny: Tiny) -> None:
    """Plain ones: `published rounding` on v4-rounded."""
    published_rounding(of(tiny("deepseek_v4", keys=DIMS, storage=storage)))


def test_the_bits_of_any_schedule(subject: Subject) -> None:
    """Chunks that end inside of windows and at their edges, with NaN in all that nobody owns."""
    config = replace(base(subject), batch_invariant=True)
    asks = [Ask(prompt(43), 5), Ask(prompt(1), 9, arrives=1), Ask(prompt(24, 1), 3, arrives=1)]
    cuts = {
        f"{budget} tokens": {"max_num_batched_tokens": budget, "block_size": size, "poison": True}
        for budget, size in ((8, 16), (11, 5), (17, 16))
    }
    same_bits_under(subject.model, asks, config, cuts)
    decode_is_prefill(subject.model, Ask(prompt(13), 20), config)


@pytest.mark.parametrize("check", [prefix_is_cold, preempted_resumes])
def test_prefixes_and_preemption(subject: Subject, check: Callable[[Subject], None]) -> None:
    """Bit by bit: elsewhere the last bit of a row may choose another code."""
    invariant = {"batch_invariant": True, "poison": True}
    check(replace(subject, options=subject.options | invariant))


def test_ranks(subject: Subject) -> None:
    """Two and four have the bits of one in batch-invariant mode; elsewhere each of them equals the
    reference over what it stored."""
    invariant = replace(base(subject), batch_invariant=True)
    ranks_are_as_one(subject.model, ON_RANKS, invariant, 2, 4)
    for done in serve_on_ranks(subject.model, ON_RANKS, base(subject), 2, expert_parallel=True):
        oracle(subject.model, ON_RANKS, done)


@pytest.mark.slow
def test_captured_steps(subject: Subject) -> None:
    """By the same kernels: those of others may choose other codes."""
    ops = dict.fromkeys(("compress", "sink_attention", "index_scores", "topk"), "triton")
    graph_is_eager(replace(subject, options=subject.options | {"ops": ops}))


def test_kernels_for_a_gpu(subject: Subject) -> None:
    """Whose own ways to a cache do not round: what makes a row leaves it to the layer."""
    ops = dict.fromkeys(("compress", "sink_prepare", "index_scores", "row_rounding"), "triton")
    asks = [Ask(prompt(24), 2), Ask(prompt(5), 2, arrives=1)]
    oracle(subject.model, asks, run(subject.model, asks, base(subject), ops=ops, block_size=3))


def test_a_cache_in_fp8_holds_the_same_numbers(subject: Subject) -> None:
    """Of its layouts the one with the groups and scales of these numerics."""
    config = replace(base(subject), batch_invariant=True)
    fp8 = replace(config, kv_cache_dtype="fp8", kv_cache_group_size=64, kv_cache_scale_fmt="ue8m0")
    plain, small = (run(subject.model, MIXED[:2], each) for each in (config, fp8))
    assert small.core.plan.cache_bytes < plain.core.plan.cache_bytes
    same("cache in fp8", small, plain, bitwise=True)


def test_index_keys_in_bfloat16(subject: Subject) -> None:
    config = replace(base(subject), batch_invariant=True)
    plain, short = (
        run(subject.model, MIXED[:1], replace(config, index_cache_dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    same("index keys in bfloat16", short, plain, bitwise=True)


def test_the_reference_of_the_op(subject: Subject) -> None:
    done = run(subject.model, MIXED[1:2], base(subject), ops={"row_rounding": "reference"})
    oracle(subject.model, MIXED[1:2], done)


def test_a_row_that_rounds_otherwise_is_seen(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One code in a thousand is the next one or so: no float32 errs so far."""
    own = composed.through_e4m3

    def jumps(x: torch.Tensor, group: int, power_of_two: bool) -> torch.Tensor:
        made = own(x, group, power_of_two)
        made[::13, 5] *= 1.125
        return made

    monkeypatch.setattr(composed, "through_e4m3", jumps)
    done = run(subject.model, MIXED[:1], base(subject))
    with pytest.raises(CheckFailed, match="window 0 is not the reference's, rounded"):
        oracle(subject.model, MIXED[:1], done)


def test_another_numerics_is_seen(subject: Subject) -> None:
    done = run(subject.model, MIXED[:2], replace(base(subject), numerics="weights"))
    with pytest.raises(CheckFailed, match="the plan has weights: asked for"):
        numerics_oracle(subject.model, MIXED[:2], done)


def test_cached_tokens_are_of_one_numerics(subject: Subject) -> None:
    plain = load_engine(subject.model, replace(base(subject), numerics="weights")).core
    assert plain.fingerprint != load_engine(subject.model, base(subject)).core.fingerprint
