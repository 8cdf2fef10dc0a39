"""Decoding with drafts against plain decoding: the same tokens, logprobs and logits, whatever was
guessed, and a cache that holds nothing of what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.core import EngineCore
from trueline.engine.live_request import LiveRequest
from trueline.engine.loading import load_engine
from trueline.verify.cases import Subject
from trueline.verify.engine import BAND, Ask, EngineRun, run, same, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.graphs import emulated, watch
from trueline.verify.schedules import base, prompt

NUM_DRAFTS = 2
Pattern = tuple[bool, ...]
"""Of each draft, whether it is right."""


def patterns(num_drafts: int) -> list[Pattern]:
    return list(product((True, False), repeat=num_drafts))


@dataclass
class ForcedDrafts:
    """Knows the answers, and drafts right and wrong tokens in every pattern, one after another."""

    patterns: Sequence[Pattern]
    answers: dict[str, list[int]] = field(default_factory=dict)
    """By request_id: prompt and plain decoding's tokens. Of others nothing is drafted."""
    num_tokens: int = NUM_DRAFTS
    seen: dict[str, int] = field(default_factory=dict)

    def propose(self, request: LiveRequest) -> list[int]:
        answer = self.answers.get(request.request_id)
        if answer is None:
            return []
        turn = self.seen.get(request.request_id, 0)
        self.seen[request.request_id] = turn + 1
        start = 3 * len(self.seen)  # not all of them the same at a time
        pattern = self.patterns[(start + turn) % len(self.patterns)]
        after = [*answer[len(request.tokens) :], *[0] * len(pattern)]
        return [
            token if right else (token + 1 + i) % 311
            for i, (token, right) in enumerate(zip(after, pattern, strict=False))
        ]


# Long answers, so that each goes through all patterns; drawn and with penalties as well.
ASKS = [
    Ask(prompt(9), 22, params={"logprobs": 2}),
    Ask(
        prompt(31),
        18,
        arrives=2,
        params={
            "temperature": 0.9,
            "seed": 5,
            "logprobs": 0,
            # a few tokens, each less likely the more often it has come
            "frequency_penalty": 2.0,
            "logit_bias": {5: 30.0, 6: 30.0, 7: 30.0},
        },
    ),
    Ask(prompt(14), 20, arrives=3),
]
# Rows that can be captured: nothing is asked for but tokens, and all have as many drafts.
PLAIN_ASKS = [
    Ask(prompt(9), 13),
    Ask(prompt(17), 12, arrives=1, params={"temperature": 0.8, "seed": 3}),
]


def drafts_are_plain(subject: Subject) -> None:
    """Rows with 0 to k drafts beside each other and beside prefill, over small blocks, with NaN in
    all that nobody owns."""
    config = replace(base(subject), block_size=5, max_num_batched_tokens=24, poison=True,
                     canary_interval=1)  # fmt: skip
    every = [each for count in range(NUM_DRAFTS + 1) for each in patterns(count)]
    drafter = ForcedDrafts(every)
    core = load_engine(subject.model, config, drafter=drafter).core
    compared("drafts = plain", subject, config, core, ASKS, drafter)


def captured_drafts_are_plain(subject: Subject) -> None:
    """The same in captured steps, where all rows have as many tokens."""
    config = replace(base(subject), block_size=5, max_num_seqs=2, poison=True, canary_interval=1)
    drafter = ForcedDrafts(patterns(NUM_DRAFTS))
    on_gpu = find_device(config.device).is_gpu
    core = (
        load_engine(subject.model, config, drafter=drafter).core
        if on_gpu
        else emulated(subject, config, drafter)
    )
    steps = watch(core)
    compared("drafts = plain, captured", subject, config, core, PLAIN_ASKS, drafter)
    each = {step.key.tokens_per_row for step in steps}
    if each != {1, 1 + NUM_DRAFTS}:
        raise CheckFailed(f"drafts = plain, captured: rows of {sorted(each)} tokens were captured")


def compared(
    what: str,
    subject: Subject,
    config: EngineConfig,
    core: EngineCore,
    asks: Sequence[Ask],
    drafter: ForcedDrafts,
) -> None:
    """Also the next turn of each chat, which finds what the first has left in the cache."""
    plain = run(subject.model, asks, config, enforce_eager=True)
    drafter.answers = {
        f"check-{i}": [*ask.prompt, *tokens]
        for i, (ask, tokens) in enumerate(zip(asks, plain.tokens, strict=True))
    }
    try:
        drafted = serve(core, asks)
        if min(drafter.seen.values()) < len(drafter.patterns):
            raise CheckFailed(f"{what}: only {drafter.seen} patterns of {len(drafter.patterns)}")
        drafter.answers = {}
        turns = [
            Ask([*ask.prompt, *tokens, 7, 9], 2)
            for ask, tokens in zip(asks, plain.tokens, strict=True)
        ]
        second = serve(core, turns)
    finally:
        core.close()
    same(what, drafted, plain)
    same_scores(what, drafted, plain)
    found = [c > len(ask.prompt) for c, ask in zip(second.cached, asks, strict=True)]
    if not all(found):
        raise CheckFailed(f"{what}: second turns found only {second.cached} tokens cached")
    cold = run(subject.model, turns, config, enforce_eager=True, enable_prefix_caching=False)
    same(f"{what}, second turn", second, cold)


def same_scores(what: str, one: EngineRun, two: EngineRun) -> None:
    """What was reported of each token: itself, and the likeliest beside it."""
    for i, (left, right) in enumerate(zip(one.outputs, two.outputs, strict=True)):
        ours, theirs = (
            [score for output in outputs for score in output.scores] for outputs in (left, right)
        )
        for a, b in zip(ours, theirs, strict=True):
            ids = [token for token, _ in a.top] == [token for token, _ in b.top]
            near = a.logprob == b.logprob or abs(a.logprob - b.logprob) <= BAND
            if not (a.token_id == b.token_id and ids and (near or a.rank == b.rank == 0)):
                raise CheckFailed(f"{what}: request {i}: {a} and {b}")


CAPTURED_DRAFTS: dict[str, Callable[[Subject], None]] = {
    "drafts = plain, captured": captured_drafts_are_plain
}
DRAFT_CHECKS = {"drafts = plain": drafts_are_plain, **CAPTURED_DRAFTS}
