"""What shows that a composition was forced: each returns the evidence, and raises NotForced where
it did not happen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trueline.verify.suite.composition import Ran


class NotForced(Exception):
    """Why a composition does not happen here."""


def paths(ran: Ran, *wanted: str) -> str:
    found: dict[str, int] = {}
    for request in ran.requests.observed:
        for path in request.paths.values():
            found[path] = found.get(path, 0) + 1
    if missing := [path for path in wanted if path not in found]:
        raise NotForced(f"no position was computed in {', '.join(missing)}")
    return ", ".join(f"{count} positions in {path}" for path, count in sorted(found.items()))


def chunked(ran: Ran) -> str:
    chunks = sum(prefills for _, prefills, _ in ran.steps)
    if chunks <= len(ran.done.tokens):
        raise NotForced("every prompt was computed in one step")
    return f"{len(ran.done.tokens)} prompts in {chunks} chunks"


def one_token_tail(ran: Ran) -> str:
    tails = sum(
        len(request.chunks) > 0 and request.paths.get(prompt - 1, "").startswith("decode")
        for prompt, request in zip(ran.prompts, ran.requests.observed, strict=True)
    )
    if not tails:
        raise NotForced("no prompt's last token was computed by itself")
    return f"{tails} prompts whose last token was computed alone, in a row like decode's"


def ends_at(ran: Ran, size: int) -> str:
    counts = [request.count for request in ran.requests.observed]
    if not any(count >= size for count in counts):
        raise NotForced(f"no request reaches {size} positions here")
    return f"requests of {', '.join(map(str, counts))} positions, around multiples of {size}"


def hits(ran: Ran) -> str:
    if not any(ran.done.cached):
        raise NotForced("nothing was found in the prefix cache")
    return f"cached tokens of the requests: {', '.join(map(str, ran.done.cached))}"


def chose(ran: Ran) -> str:
    rows = sum(len(each) for request in ran.requests.observed for each in request.chosen.values())
    if not rows:
        raise NotForced("no position saw more than it may choose")
    return f"{rows} selections"


def preempted(ran: Ran) -> str:
    count = ran.core.scheduler.counters.num_preemptions
    if not count:
        raise NotForced("nothing was preempted")
    return f"{count} preemptions"


def preempted_within_a_prompt(ran: Ran) -> str:
    told = preempted(ran)
    again = [
        sum(request.chunks) - prompt
        for request, prompt in zip(ran.requests.observed, ran.prompts, strict=True)
    ]
    ended = ran.done.tokens[-1]
    if again[-1] <= 0 or not ended:
        raise NotForced("no prompt was computed in part, and then once more")
    return f"{told}; {again[-1]} tokens of a prompt were computed again"


def highest(ran: Ran) -> str:
    observed = ran.requests.observed
    used = {block for each in observed for held in each.blocks.values() for block in held}
    last = ran.core.plan.num_blocks - 1
    if last not in used:
        raise NotForced(f"block {last:,} was not used")
    return f"blocks up to {last:,}"


def turned_over(ran: Ran) -> str:
    return f"blocks of {ran.core.plan.num_blocks - 1} used by 24 requests before"
