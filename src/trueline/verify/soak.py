"""Hours in minutes: requests that come, go, are aborted and preempted at random while the caches
are refilled many times, each compared with its answer when it was alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest
from trueline.engine.params import SamplingParams
from trueline.verify.engine import Ask, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import prompt

MARGIN = 1e-3
"""Between the two likeliest tokens of every step of an answer: closer ones, rounding may swap."""
ABORTED = 0.15
"""Of the requests, before they finish."""


@dataclass
class Tally:
    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    seconds: float = 0.0


@dataclass
class Flight:
    """A request under way: what it should say, what it has said."""

    expected: list[int]
    got: list[int] = field(default_factory=list)
    abort_after: int | None = None


def soak(
    model: Path,
    config: EngineConfig,
    seconds: float,
    *,
    seed: int = 0,
    report: Callable[[Tally], None] | None = None,
) -> Tally:
    """Raises CheckFailed at the first wrong token."""
    pool = solo_answers(model, config, 48)
    draw = random.Random(seed)
    core = load_engine(model, config).core
    flights: dict[str, Flight] = {}
    tally = Tally()
    begin = reported = time.monotonic()
    while (now := time.monotonic()) - begin < seconds or core.has_unfinished():
        if now - begin < seconds and len(flights) < 24 and draw.random() < 0.3:
            _add(core, flights, f"{tally.steps}", *draw.choice(pool), draw)
        for output in core.step():
            _take(core, flights, tally, output.request_id, output.token_ids, output.finish_reason)
            tally.cached_tokens += output.num_cached_tokens if output.finish_reason else 0
        tally.steps += 1
        if report and now - reported > 10:
            reported = now
            report(_counted(tally, core, now - begin))
    core.close()
    core.pool.check()
    return _counted(tally, core, time.monotonic() - begin)


def solo_answers(model: Path, config: EngineConfig, count: int) -> list[tuple[Ask, list[int]]]:
    """Requests with common beginnings, and what each says alone; those with a near-tie on the way
    are left out."""
    core = load_engine(model, replace(config, poison=False)).core
    found: list[tuple[Ask, list[int]]] = []
    heads = [prompt(70, 91), prompt(33, 92), []]
    number = 0
    while len(found) < count:
        number += 1
        ask = Ask([*heads[number % 3], *prompt(1 + number * 7 % 60, number)], 4 + number * 5 % 37)
        alone = serve(core, [ask])
        first = len(ask.prompt) - 1
        rows = torch.stack([alone.logits[0][p] for p in sorted(alone.logits[0]) if p >= first])
        best = rows.topk(2, dim=-1).values
        if float((best[:, 0] - best[:, 1]).min()) > MARGIN:
            found.append((ask, alone.tokens[0]))
    core.close()
    return found


def _add(
    core: EngineCore,
    flights: dict[str, Flight],
    name: str,
    ask: Ask,
    answer: list[int],
    draw: random.Random,
) -> None:
    abort = draw.randrange(ask.max_tokens) if draw.random() < ABORTED else None
    flights[name] = Flight(answer, abort_after=abort)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ask.max_tokens)
    core.add(CoreRequest(request_id=name, prompt_token_ids=ask.prompt, params=params))


def _take(
    core: EngineCore,
    flights: dict[str, Flight],
    tally: Tally,
    name: str,
    tokens: list[int],
    reason: str | None,
) -> None:
    flight = flights.get(name)
    if flight is None:
        return
    flight.got += tokens
    tally.tokens += len(tokens)
    if flight.got != flight.expected[: len(flight.got)]:
        raise CheckFailed(
            f"soak: step {tally.steps}, request {name}: {flight.got} is not the beginning of "
            f"{flight.expected}"
        )
    if reason is not None:
        if reason != "length" or flight.got != flight.expected:
            raise CheckFailed(f"soak: request {name} ended with '{reason}' after {flight.got}")
        tally.finished += 1
        del flights[name]
    elif flight.abort_after is not None and len(flight.got) > flight.abort_after:
        core.abort(name, report=False)
        tally.aborted += 1
        del flights[name]


def _counted(tally: Tally, core: EngineCore, seconds: float) -> Tally:
    tally.preemptions = core.scheduler.counters.num_preemptions
    tally.evictions = core.pool.num_evictions
    tally.seconds = seconds
    return tally
