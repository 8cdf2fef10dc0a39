"""The engine's invariants as named checks on a tiny model: the same requests under two schedules,
or against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, EngineRun, close, oracle, run, same, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.ops.sampling import GATE
from trueline.verify.ranks import ranks_are_as_one

BASE = EngineConfig(max_model_len=400, max_num_seqs=8, num_gpu_blocks_override=400, block_size=16)


def base(subject: Subject) -> EngineConfig:
    return replace(BASE, facts=subject.facts, **subject.options)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(311, (length,), generator=generator).tolist()


MIXED = [
    Ask(prompt(40), 5),
    Ask(prompt(1), 6, arrives=1),
    Ask(prompt(90), 3, arrives=2),
    Ask(prompt(16), 5, arrives=2),
]


def engine_oracle(subject: Subject) -> None:
    """Mixed steps, blocks of 3: every position equals the float64 reference."""
    oracle(subject.model, MIXED, run(subject.model, MIXED, base(subject), block_size=3))


def split_is_whole(subject: Subject) -> None:
    whole = run(subject.model, MIXED, base(subject))
    for budget in (8, 13):
        split = run(
            subject.model, MIXED, base(subject), max_num_batched_tokens=budget, block_size=5
        )
        same("split = whole", split, whole)


def solo_is_batch(subject: Subject) -> None:
    """One after the other on one engine, and all of them together on another."""
    batch = run(subject.model, MIXED, base(subject))
    core = load_engine(subject.model, base(subject)).core
    try:
        for i, ask in enumerate(MIXED):
            alone = serve(core, [replace(ask, arrives=0, cache_salt=str(i))])
            same("solo = batch", alone, batch.only(i))
    finally:
        close(core)


def prefix_is_cold(subject: Subject, *, bitwise: bool = False) -> None:
    """Equal blocks after different beginnings, equal beginnings with different ends."""
    size = load_engine(subject.model, base(subject)).core.blocks.lcm_block_size
    head, other = prompt(3 * size, 7), prompt(3 * size, 8)
    asks = [
        Ask([*head, 1, 2, 3], 4),
        Ask(other, 4),
        Ask([*head, 4, 5], 6, arrives=8),
        Ask([*head[:size], *other[size:], 9], 3, arrives=8),
        Ask(head, 4, arrives=10),
    ]
    warm = run(subject.model, asks, base(subject), snapshot_spacing=size)
    wanted = [0, 0, 3 * size, size, 2 * size]
    if warm.cached != wanted:
        raise CheckFailed(f"prefix = cold: cached tokens {warm.cached}, expected {wanted}")
    cold = run(subject.model, asks, base(subject), enable_prefix_caching=False)
    same("prefix = cold", warm, cold, bitwise=bitwise)
    few = run(subject.model, asks, base(subject))
    same("prefix = cold, few snapshots", few, cold, bitwise=bitwise)


def preempted_resumes(subject: Subject) -> None:
    asks = [Ask(prompt(30, i), 30) for i in range(4)]
    tight = run(subject.model, asks, base(subject), num_gpu_blocks_override=16, block_size=8,
                max_num_batched_tokens=64)  # fmt: skip
    if not tight.core.scheduler.counters.num_preemptions:
        raise CheckFailed("preempt = resume: nothing was preempted")
    same("preempt = resume", tight, run(subject.model, asks, base(subject)))


def poison(subject: Subject) -> None:
    """NaN in every byte that no request owns changes nothing."""
    clean = run(subject.model, MIXED, base(subject), block_size=5)
    same("poison", run(subject.model, MIXED, base(subject), block_size=5, poison=True), clean)


def overlapped_is_plain(subject: Subject) -> None:
    asks = [replace(ask, params={"temperature": 0.9, "seed": i, "repetition_penalty": 1.3})
            for i, ask in enumerate(MIXED)]  # fmt: skip
    plain, ahead = (run(subject.model, asks, base(subject), overlap=o) for o in (False, True))
    same("overlapped = plain", ahead, plain)


def bits_are_the_rows_own(subject: Subject) -> None:
    """Batch-invariant mode: bit by bit the same, split or whole, alone or together."""
    config = replace(base(subject), batch_invariant=True)
    whole = run(subject.model, MIXED, config)
    oracle(subject.model, MIXED, whole)
    split = run(subject.model, MIXED, config, max_num_batched_tokens=8, block_size=3)
    same("batch-invariant", split, whole, bitwise=True)
    alone = run(subject.model, [replace(MIXED[2], arrives=0)], config)
    one = EngineRun([whole.tokens[2]], [whole.logits[2]], [0], [], whole.core)
    same("batch-invariant", alone, one, bitwise=True)


def draws_are_the_requests_own(subject: Subject) -> None:
    """A seeded request draws the same tokens alone, and beside others with or without seeds."""
    hot = {"temperature": 1.0, "top_p": 0.95}
    seeded = Ask(prompt(12), 10, params=hot | {"seed": 3})
    alone = run(subject.model, [seeded], base(subject)).tokens[0]
    others = [Ask(prompt(5, 1), 9, params=hot), Ask(prompt(8, 2), 4, params=hot | {"seed": 3})]
    for asks, at in (([*others, seeded], 2), ([others[0], seeded, others[1]], 1)):
        if run(subject.model, asks, base(subject)).tokens[at] != alone:
            raise CheckFailed("seeded draws: a request's tokens depend on its neighbours")
    reseeded = replace(seeded, params=hot | {"seed": 4})
    if run(subject.model, [reseeded], base(subject)).tokens[0] == alone:
        raise CheckFailed("seeded draws: the seed changes nothing")


def logprobs_are_raw(subject: Subject) -> None:
    """Reported logprobs are the model's own, whatever bias and penalties do to the choice."""
    params: JSON = {"logprobs": 3, "logit_bias": {5: 40.0}, "presence_penalty": 1.5}
    done = run(subject.model, [Ask(prompt(12), 4, params=params)], base(subject))
    rows = done.logits[0]
    scores = [score for output in done.outputs[0] for score in output.scores]
    for i, score in enumerate(scores):
        exact = rows[11 + i].double().log_softmax(-1)
        own = float(exact[score.token_id])
        if abs(score.logprob - own) > GATE * abs(own):
            raise CheckFailed(f"raw logprobs: token {i}: {score.logprob} is not the model's own")
        if score.rank != 1 + int((exact > exact[score.token_id]).sum()):
            raise CheckFailed(f"raw logprobs: token {i}: rank {score.rank} is wrong")


def steady_state(subject: Subject) -> None:
    """The same probe before and after the cache has turned over."""
    config = replace(base(subject), num_gpu_blocks_override=14, block_size=8, num_state_slots=3)
    core = load_engine(subject.model, config).core
    probe = Ask(prompt(33, 5), 5)
    before = serve(core, [probe])
    for i in range(12):
        serve(core, [Ask(prompt(40 + i, i), 5), Ask(prompt(20, i), 5)])
    same("steady state", serve(core, [probe]), before)


FP8_LATENTS: tuple[JSON, ...] = (
    {"kv_cache_dtype": "fp8", "kv_cache_group_size": 16},
    {"kv_cache_dtype": "e4m3fn", "kv_cache_scale_fmt": "ue8m0"},
)
OTHER_FP8: JSON = {
    "kv_cache_dtype": "e4m3fnuz",
    "kv_cache_group_size": "token",
    "kv_cache_scale_fmt": "ue8m0",
}


def fp8_latents(subject: Subject) -> None:
    """Mixed steps over latents in fp8, NaN in every byte that no request owns: every position
    equals the float64 reference over the rows that were stored."""
    for options in FP8_LATENTS:
        config = replace(base(subject), **options, poison=True, enforce_eager=True)
        done = run(subject.model, MIXED, config, block_size=3)
        if not done.stored:
            raise CheckFailed(f"fp8 latents: {options}: latents are stored as computed")
        oracle(subject.model, MIXED, done)


def fp8_latents_bitwise(subject: Subject) -> None:
    """Batch-invariant mode: bit by bit the same, split or whole, alone or together, after a prefix
    hit and after preemption. Elsewhere the last bit of a latent may choose another code."""
    for options in (*FP8_LATENTS[:1], OTHER_FP8):
        stored = replace(subject, options=subject.options | options)
        bits_are_the_rows_own(stored)
        invariant = replace(stored, options=stored.options | {"batch_invariant": True})
        prefix_is_cold(invariant)
        preempted_resumes(invariant)


# The first and last words of the vocabulary of each of 2, 4 and 8 ranks.
WORDS = 312
EDGES = [word for start in range(0, WORDS, WORDS // 8) for word in (start, start + WORDS // 8 - 1)]
ON_RANKS = [Ask([*EDGES[:-1], *prompt(5)], 4), Ask(prompt(7), 4, arrives=1)]

BOTH = (False, True)
"""Routed experts by width and whole."""
RANKS = 2


def ranks_are_one(subject: Subject, size: int = RANKS) -> None:
    ranks_are_as_one(subject.model, ON_RANKS, base(subject), size, expert_parallel=BOTH)


def ranks_have_the_bits_of_one(subject: Subject, size: int = RANKS) -> None:
    config = replace(base(subject), batch_invariant=True)
    ranks_are_as_one(subject.model, ON_RANKS, config, size, expert_parallel=BOTH)


def ranks_serve_as_one(subject: Subject, size: int = RANKS) -> None:
    """Seeded draws; two requests at a time, then one that starts from the prefix of another."""
    head = prompt(36, 3)
    arrivals = ((head, 0), (prompt(7), 1), ([*head[:32], 5, 6], 9))
    asks = [
        Ask(tokens, 6, arrives, params={"temperature": 1.0, "seed": seed})
        for seed, (tokens, arrives) in enumerate(arrivals)
    ]
    one = ranks_are_as_one(subject.model, asks, replace(base(subject), snapshot_spacing=16), size)
    if one.cached != [0, 0, 32]:
        raise CheckFailed(f"ranks = one, requests: cached tokens {one.cached}, expected [0, 0, 32]")


def collectives_in_order(subject: Subject, size: int = RANKS) -> None:
    """Every rank states what it is about to exchange, and all state the same."""
    config = replace(base(subject), batch_invariant=True, debug_collectives=True)
    ranks_are_as_one(subject.model, ON_RANKS, config, size)


RANK_CHECKS: dict[str, Callable[[Subject, int], None]] = {
    "ranks = one": ranks_are_one,
    "ranks = one, bitwise": ranks_have_the_bits_of_one,
    "ranks = one, requests": ranks_serve_as_one,
    "collectives in order": collectives_in_order,
}
"""On any number of ranks."""


ENGINE_CHECKS: dict[str, Callable[[Subject], None]] = {
    "engine oracle": engine_oracle,
    "split = whole": split_is_whole,
    "solo = batch": solo_is_batch,
    "prefix = cold": prefix_is_cold,
    "preempt = resume": preempted_resumes,
    "poison": poison,
    "overlapped = plain": overlapped_is_plain,
    "batch-invariant": bits_are_the_rows_own,
    "seeded draws": draws_are_the_requests_own,
    "raw logprobs": logprobs_are_raw,
    "steady state": steady_state,
    "fp8 latents": fp8_latents,
    "fp8 latents, bitwise": fp8_latents_bitwise,
    "ranks = one": ranks_are_one,
    "ranks = one, bitwise": ranks_have_the_bits_of_one,
    "ranks = one, requests": ranks_serve_as_one,
    "collectives in order": collectives_in_order,
}
