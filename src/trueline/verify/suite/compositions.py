"""Requests that force what a batch can be: each says which invariant it is for, and shows
afterwards that it was forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from trueline.cache.blocks import BlockPool
from trueline.engine.core import EngineCore
from trueline.errors import RequestRejected, UsageError
from trueline.plan.plan import FREE_TILING
from trueline.verify.engine import Ask, EngineRun, Observer, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.ranks import serve_on_ranks
from trueline.verify.suite import forced, not_finite
from trueline.verify.suite.composition import Composition, Ran
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.judgement import Requests
from trueline.verify.suite.not_finite import NotFinite
from trueline.verify.suite.observe import Watch
from trueline.verify.suite.prefix_hits import prefix_hits
from trueline.verify.suite.pressure import under_pressure
from trueline.verify.suite.rank_compositions import on_ranks
from trueline.verify.suite.session import DrawnTokens, Session, Started, lengths_around
from trueline.verify.suite.small_parts import SIZES, small_parts

TILE = 64
"""Positions that many kernels read at a time."""
KEYS_AT_A_TIME = FREE_TILING.size


def compositions(session: Session) -> Iterator[Composition]:
    """Smallest first, so that the first that fails is easy to look at."""
    s, block, long = session, session.common_block, min(session.longest - 40, 90)
    yield Composition(
        name="whole prompt",
        invariant="engine = definition",
        what="one request: its prompt in one step, then decode",
        asks=[Ask(s.opening(long), 12)],
        forced=lambda ran: forced.paths(ran, "prefill", "decode"),
        tier="smoke",
    )
    yield Composition(
        name="decode",
        invariant="decode = prefill",
        what="a prompt of one token; all else is decoded",
        asks=[Ask(s.tokens(1), min(40, long))],
        forced=lambda ran: forced.paths(ran, "decode"),
        tier="smoke",
    )
    yield Composition(
        name="mixed step",
        invariant="solo = batch",
        what="requests that arrive while others decode share their steps",
        asks=[
            Ask(s.tokens(40), 6),
            Ask(s.tokens(1, 1), 8, arrives=1),
            Ask(s.tokens(long, 2), 4, arrives=2),
            Ask(s.tokens(16, 3), 6, arrives=2),
            Ask(s.tokens(7, 4), 6, arrives=4),
        ],
        forced=lambda ran: forced.paths(ran, "decode, mixed", "prefill, mixed"),
        tier="smoke",
    )
    for budget in (8, 13):
        yield Composition(
            name=f"chunks of {budget}",
            invariant="split = whole",
            what=f"prompts in chunks of at most {budget} tokens, beside decode",
            asks=[Ask(s.tokens(3 * budget), 3), Ask(s.tokens(2 * budget + 1, 1), 4, arrives=1)],
            changes={"max_num_batched_tokens": budget},
            forced=forced.chunked,
            tier="smoke" if budget == 8 else "standard",
        )
    yield Composition(
        name="one-token tail",
        invariant="split = whole",
        what="prompts whose last chunk is one token: a row like decode's",
        asks=[Ask(s.tokens(17), 4), Ask(s.tokens(33, 1), 3)],
        changes={"max_num_batched_tokens": 16},
        forced=forced.one_token_tail,
    )
    yield Composition(
        name="block edges",
        invariant="split = whole",
        what="prompts and answers that end at a block's edge, one before and one after it",
        asks=[Ask(s.tokens(n, i), 4) for i, n in enumerate(lengths_around(block, s.longest - 8))],
        forced=lambda ran: forced.ends_at(ran, block),
    )
    yield Composition(
        name="tile edges",
        invariant="split = whole",
        what=f"prompts and answers that end around {TILE} and {2 * TILE} positions, which kernels "
        "read in tiles",
        asks=[Ask(s.tokens(n, i), 3) for i, n in enumerate(lengths_around(TILE, s.longest - 8))],
        forced=lambda ran: forced.ends_at(ran, TILE),
    )
    yield from _sizes(session)
    yield from prefix_hits(session, block)
    yield from under_pressure(session, block)
    yield from on_ranks(session, block)
    yield from _invariant(session, block)
    yield from _long(session)
    yield Composition(
        name="captured steps",
        invariant="graph = eager",
        what="decode steps in CUDA graphs, of batches of one size after the other",
        asks=[
            Ask(s.tokens(9 + 4 * i, i), 4 + 2 * i, arrives=i)
            for i in range(min(5, session.plan.limits.max_num_seqs))
        ],
        captured=True,
        forced=lambda ran: "decode steps were captured",
    )
    yield Composition(
        name="poison",
        invariant="poison",
        what="NaN in every byte of the caches that nobody owns; the bits are those without",
        asks=[Ask(s.tokens(40), 5), Ask(s.tokens(1, 1), 6, arrives=1), Ask(s.tokens(16, 3), 5)],
        changes={"poison": True},
        same_bits={"poison": False},
        forced=lambda ran: "caches were filled with NaN before every step",
    )
    yield Composition(
        name="one step ahead",
        invariant="overlapped = plain",
        what="the host schedules a step while the one before it runs; the bits are those without",
        asks=[Ask(s.tokens(20), 6), Ask(s.tokens(5, 1), 8, arrives=1)],
        changes={"overlap": True},
        same_bits={"overlap": False},
        forced=lambda ran: "overlap=True",
    )


def _sizes(session: Session) -> Iterator[Composition]:
    """Where an indexer begins to choose, and where windows and entries end."""
    s, topk = session, session.topk
    if topk is not None:
        yield Composition(
            name="selection edges",
            invariant="engine = definition",
            what=f"contexts around {topk:,} positions, from which on keys are chosen",
            asks=[Ask(s.tokens(n, i), 4) for i, n in enumerate((topk - 1, topk, topk + 2))]
            + [Ask(s.tokens(5), 3, arrives=1)],
            forced=forced.chose,
        )
    for size in session.windows:
        yield Composition(
            name=f"windows of {size}",
            invariant="engine = definition",
            what=f"prompts that end around multiples of {size} positions, in chunks that do too",
            asks=[
                Ask(s.tokens(n, i), 4) for i, n in enumerate(lengths_around(size, s.longest - 8))
            ],
            changes={"max_num_batched_tokens": max(size + 1, 8)},
            forced=lambda ran, size=size: forced.ends_at(ran, size),  # type: ignore[misc]
        )


def _invariant(session: Session, block: int) -> Iterator[Composition]:
    """A request's bits beside others, and alone."""
    s = session
    yield Composition(
        name="same bits alone",
        invariant="batch-invariant",
        what="batch-invariant mode: a request's bits beside others, in chunks, and alone",
        asks=[Ask(s.tokens(20), 6), Ask(s.tokens(31, 1), 6, arrives=1), Ask(s.tokens(9, 2), 8)],
        changes={"batch_invariant": True, "max_num_batched_tokens": 16},
        alone=1,
        forced=lambda ran: "batch_invariant=True, chunks of at most 16 tokens",
    )
    shared = s.tokens(2 * block, 7)
    if 3 * block + 16 <= s.longest:
        yield Composition(
            name="same bits after a prefix hit",
            invariant="batch-invariant",
            what="batch-invariant mode: a request that begins with cached blocks, and alone, cold",
            asks=[Ask([*shared, 1, 2, 3], 4), Ask([*shared, 4, 5], 6, arrives=8)],
            changes={"batch_invariant": True}
            | ({"snapshot_spacing": block} if s.plan.slots else {}),
            alone=1,
            forced=forced.hits,
            tier="full",
        )


def _long(session: Session) -> Iterator[Composition]:
    s, past = session, KEYS_AT_A_TIME + 5
    numerics = s.definition.numerics
    unjudged = f"of so many positions some have ties of codes that no draw of {numerics!r} settles"
    unjudged = unjudged if numerics == "activations" else ""
    if s.definition.room is None and s.longest > past + 8:
        yield Composition(
            name="several tiles of keys",
            invariant="engine = definition",
            what=f"a prompt of more than the {KEYS_AT_A_TIME:,} keys that are read at a time, and "
            "decode behind it",
            asks=[Ask(s.tokens(past), 4)],
            forced=lambda ran: forced.ends_at(ran, KEYS_AT_A_TIME),
            unjudged=unjudged,
        )
    if not s.in_processes:  # which have sizes of their own
        yield Composition(
            name="in small parts",
            invariant="split = whole",
            what="rows computed in several parts, which takes a long context where parts have "
            "their usual size",
            asks=[
                Ask(s.tokens(min(110, s.longest - 8)), 4),
                Ask(s.tokens(min(70, s.longest - 8), 1), 3),
                Ask(s.tokens(13, 2), 5, arrives=1),
            ],
            small_parts=True,
            forced=lambda ran: f"{len(SIZES)} sizes of parts are small",
        )
    length = s.longest - 24
    yield Composition(
        name="long context",
        invariant="engine = definition",
        what=f"{length:,} positions, as long as the definition can hold here, and decode behind "
        "them; a second one in chunks of another size",
        asks=[Ask(s.tokens(length), 6), Ask(s.tokens(length // 2 + 1, 1), 4, arrives=1)],
        forced=lambda ran: forced.ends_at(ran, length),
        unjudged=unjudged if length > past else "",
        tier="full",
    )


def run(session: Session, composition: Composition, **changes: object) -> Ran:
    """Watched. NotForced where the engine refuses these options."""
    if composition.unjudged:
        raise NotForced(composition.unjudged)
    if composition.ranks > 1:
        return _serve_on_ranks(session, composition)
    try:
        parts = small_parts() if composition.small_parts else nullcontext()
        with parts, session.core(**{**composition.changes, **changes}) as core:
            return serve_watched(session.drawn, composition, core)
    except (UsageError, RequestRejected) as error:
        raise NotForced(f"the engine refuses it: {error}") from error
    except NotFinite as found:
        weights = not_finite.of_weights(session.definition, found.first)
        raise NotFinite(found.first, f"{weights}; {found.told}") from found


def serve_watched(drawn: DrawnTokens, composition: Composition, core: EngineCore) -> Ran:
    if composition.turned_over:
        for i in range(12):
            asks = [Ask(drawn.tokens(30 + i, 20 + i), 4), Ask(drawn.tokens(20, 40 + i), 4)]
            serve(core, asks)
    watch = Watch(core, len(composition.asks))
    kept = _keep_lowest(core, composition) if composition.highest else []

    def before_step(core: EngineCore, step: int) -> None:
        for request, at in composition.abort.items():
            if at == step:
                core.abort(f"check-{request}")

    try:
        done = serve(core, composition.asks, before_step, observer=watch)
    except CheckFailed as stopped:
        place = not_finite.first_not_finite(composition.name, watch.requests)
        if place is None:
            raise
        raise NotFinite(place, str(stopped)) from stopped
    finally:
        watch.close()
        for pool, blocks in kept:
            pool.release(blocks)
    return _finished(composition, done, watch)


def _keep_lowest(core: EngineCore, composition: Composition) -> list[tuple[BlockPool, list[int]]]:
    """Blocks that nobody else gets: all but what the requests need, and some."""
    positions = sum(len(ask.prompt) + ask.max_tokens for ask in composition.asks)
    kept = []
    for pool in core.blocks.pools:
        needed = 2 * (positions // pool.block_size + len(composition.asks)) + 8
        blocks = pool.allocate(pool.num_free)
        pool.release(blocks[: -needed - 1 : -1])  # the last one is given first
        kept.append((pool, blocks[:-needed]))
    return kept


def _serve_on_ranks(session: Session, composition: Composition) -> Ran:
    if session.plan.device.is_gpu:
        raise NotForced("ranks share a process on a CPU only; on GPUs: make test-ranks")
    watches: list[Watch] = []

    def watching(core: EngineCore) -> Observer:
        session.started.append(Started(core.config, frozenset(composition.changes), core.plan))
        watches.append(Watch(core, len(composition.asks)))
        return watches[0]

    try:
        served = serve_on_ranks(
            session.model,
            composition.asks,
            session.engine_config(**composition.changes),
            composition.ranks,
            expert_parallel=composition.expert_parallel,
            watching=watching,
        )
    except UsageError as error:
        raise NotForced(f"the model cannot be divided so: {error}") from error
    first, *others = served
    for number, other in enumerate(others, 1):
        require_same_bits(f"ranks = one: rank {number} and rank 0", other, first)
    return _finished(composition, first, watches[0])


def _finished(composition: Composition, done: EngineRun, watch: Watch) -> Ran:
    asked = zip(composition.asks, done.tokens, strict=True)
    watch.finish([[*ask.prompt, *out] for ask, out in asked], done)
    prompts = [len(ask.prompt) for ask in composition.asks]
    requests = Requests(composition.name, watch.requests)
    return Ran(done.core, done, requests, prompts, watch.steps, watch.step_seconds)


def require_same_bits(what: str, one: EngineRun, two: EngineRun) -> None:
    for i, (a, b) in enumerate(zip(one.logits, two.logits, strict=True)):
        if one.tokens[i] != two.tokens[i]:
            raise CheckFailed(f"{what}: request {i}: other tokens")
        for p in sorted(a.keys() & b.keys()):
            if not torch.equal(a[p], b[p]):
                raise CheckFailed(f"{what}: request {i}, position {p}: bits differ")
