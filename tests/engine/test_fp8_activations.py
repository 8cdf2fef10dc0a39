"""Numerics `activations`: the engine equals the reference, which defines them, for every family
that is published in block fp8, with float32 and ue8m0 scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline import reference
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.errors import UsageError
from trueline.verify.cases import FP4, FP8_32, FP8_UE8M0, Subject
from trueline.verify.engine import run
from trueline.verify.failed import CheckFailed
from trueline.verify.numerics import (
    ASKS,
    CHUNKED,
    Noise,
    fp8_activations_bitwise,
    load_activations,
    numerics_oracle,
)
from trueline.verify.ranks import serve_on_ranks
from trueline.weights.formats import Storage
from trueline.weights.formats.block_fp8 import BlockFp8

Tiny = Callable[..., Path]
BASE = EngineConfig(
    max_model_len=400,
    max_num_seqs=8,
    num_gpu_blocks_override=400,
    block_size=16,
    numerics="activations",
)
# Groups of 128 channels, the last ones partial.
SIZES = {
    "hidden_size": 160,
    "intermediate_size": 192,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 2,
}
# Whole groups on each of four ranks.
DIVIDED = {
    "num_attention_heads": 4,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_shared_experts": 4,
    "n_routed_experts": 8,
}
# Experts too. With 512 columns of the dense MLP half of the positions jump, on one rank as on two.
BY_WIDTH = DIVIDED | {
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
}
DIVIDED_LING: Mapping[str, float] = {
    "num_attention_heads": 4,
    "v_head_dim": 128,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 512,
    "num_experts": 8,
}
LING = {"layer_group_size": 2}
# g_proj is multiplied with query_key_value, which is quantised.
EXEMPT = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=("g_proj", "q_a_proj"))


@dataclass(frozen=True)
class Published:
    family: str
    storage: Storage
    keys: Mapping[str, int] = field(default_factory=dict)


PUBLISHED = {
    "v3": Published("deepseek_v3", FP8_32),
    "v3-ue8m0": Published("deepseek_v3", FP8_UE8M0),
    "v3-exempt": Published("deepseek_v3", EXEMPT),
    "v3-fp4": Published("deepseek_v3", FP4),
    "v32": Published("deepseek_v32", FP8_32),
    "v32-ue8m0": Published("deepseek_v32", FP8_UE8M0),
    "glm5": Published("glm_moe_dsa", FP8_32),
    "glm5-ue8m0": Published("glm_moe_dsa", FP8_UE8M0),
    "ling": Published("bailing_moe_v2_5", EXEMPT, LING),
    "ling-ue8m0": Published("bailing_moe_v2_5", FP8_UE8M0, LING),
    "k2": Published("kimi_k2", FP8_32),
    "k2-ue8m0": Published("kimi_k2", FP8_UE8M0),
}


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def made(tiny: Tiny, name: str, **keys: float) -> Path:
    published = PUBLISHED[name]
    return tiny(published.family, keys=SIZES | published.keys | keys, storage=published.storage)


# Of each family one kind of scales; the others' arithmetic is that of v3.
QUICK = ("v3", "v3-ue8m0", "v3-exempt", "v3-fp4", "v32-ue8m0", "glm5", "ling", "k2-ue8m0")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in PUBLISHED])
def test_mixed_and_chunked_steps_equal_the_reference(name: str, tiny: Tiny) -> None:
    model = made(tiny, name)
    numerics_oracle(model, ASKS, run(model, ASKS, BASE, **CHUNKED))


@pytest.mark.parametrize("name", ["v3-ue8m0", "v32", "ling"])
def test_batch_invariant(name: str, tiny: Tiny) -> None:
    """On ranks whose cuts would fall inside of groups too: each computes whole sums."""
    subject = Subject(name, made(tiny, name), torch.empty(0), torch.empty(0))
    fp8_activations_bitwise(subject)


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("v3", 2, DIVIDED),
        ("v3-ue8m0", 4, DIVIDED),
        slow("v32", 2, DIVIDED),
        ("glm5-ue8m0", 4, DIVIDED),
        slow("k2", 4, DIVIDED),
        ("ling", 2, DIVIDED_LING),
        slow("ling-ue8m0", 4, DIVIDED_LING),
        ("v3", 2, BY_WIDTH),
    ],
)
def test_ranks_equal_the_reference(
    name: str, ranks: int, more: Mapping[str, float], tiny: Tiny
) -> None:
    """Experts by width where that leaves whole groups of inputs."""
    model, whole = made(tiny, name, **more), more["moe_intermediate_size"] < 128 * ranks
    for done in serve_on_ranks(model, ASKS, BASE, ranks, expert_parallel=whole):
        numerics_oracle(model, ASKS, done)


def test_ranks_that_cut_groups_are_refused(tiny: Tiny) -> None:
    model = made(tiny, "v3", num_attention_heads=4)
    with pytest.raises(UsageError, match=r"o_proj\.weight: this rank has columns"):
        serve_on_ranks(model, ASKS, BASE, 2)


@pytest.mark.parametrize("name", ["v3", "v3-ue8m0", "ling"])
def test_noise_is_that_of_the_reference(name: str, tiny: Tiny) -> None:
    """What activations in fp8 do to a model, which is far more than float32 does, is no more and
    no less than the definition says."""
    model = made(tiny, name)
    done = run(model, ASKS, BASE)
    exact, defined = reference.load(model), load_activations(model)
    wanted, ours, theirs = [], [], []
    for i, ask in enumerate(ASKS):
        sequence = torch.tensor([*ask.prompt, *done.tokens[i]][:-1])
        wanted.append(exact.logprobs(sequence))
        theirs.append(defined.logprobs(sequence))
        ours.append(done.logprobs(i)[: len(sequence)])
    right = Noise.of(torch.cat(wanted), torch.cat(theirs))
    noise = Noise.of(torch.cat(wanted), torch.cat(ours))
    assert right.mean_kl > 1e-4
    assert noise.mean_kl == pytest.approx(right.mean_kl, rel=0.1)
    assert noise.top1 == pytest.approx(right.top1, abs=0.05)


def test_cached_tokens_are_of_one_numerics(tiny: Tiny) -> None:
    """The hashes of their blocks begin with it."""
    model = made(tiny, "v3")
    plain = load_engine(model, replace(BASE, numerics="weights")).core.fingerprint
    first, again = (load_engine(model, BASE).core.fingerprint for _ in range(2))
    assert plain != first == again


def test_another_numerics_is_seen(tiny: Tiny) -> None:
    model = made(tiny, "v3")
    plain = run(model, ASKS, replace(BASE, numerics="weights"))
    with pytest.raises(CheckFailed, match="the plan has weights: asked for"):
        numerics_oracle(model, ASKS, plain)
