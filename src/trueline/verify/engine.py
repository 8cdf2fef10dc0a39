"""Invariants of the running engine. Each runs the same requests under different schedules and
compares the logits of every position of every request; the oracle is the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline import reference
from trueline.config import EngineConfig
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.params import SamplingParams
from trueline.errors import EngineBroken
from trueline.ops.capabilities import PUBLISHED
from trueline.reference import Reference
from trueline.utils.json_types import JSON
from trueline.verify import bounds
from trueline.verify.failed import CheckFailed
from trueline.verify.latent_rows import CachedLatents, LatentRecorder
from trueline.verify.rounded_rows import RoundedRows, RowRecorder

ORACLE_GATE = 2e-5
"""Engine in float32 to the reference in float64, in logprob, at any position."""
NOISE, MOST_NOISE = 4.0, 1e-4
"""Where a CPU's own order of sums does not keep that: so many times what the reference itself is
off in float32 on this machine, but never more than this. Seeded faults are off by 1e-2 and more."""
BAND = 2e-5
"""Between two schedules in float32, outside batch-invariant mode."""


@dataclass(frozen=True)
class Ask:
    """A request of a check: when it arrives, what it says, how much it wants."""

    prompt: list[int]
    max_tokens: int = 8
    arrives: int = 0
    """Step before which it is added."""
    priority: int = 0
    params: JSON = field(default_factory=dict)
    cache_salt: str | None = None
    eos_token_ids: list[int] = field(default_factory=list)
    bad_word_ids: list[list[int]] = field(default_factory=list)


@dataclass
class EngineRun:
    """What came of it: per request its tokens, and the logits of every position computed."""

    tokens: list[list[int]]
    logits: list[dict[int, Tensor]]
    cached: list[int]
    outputs: list[list[CoreOutput]]
    core: EngineCore
    sampled_from: list[dict[int, Tensor]] = field(default_factory=list)
    """Logits of positions that were computed again later, as they were first: what a preempted
    request had drawn its tokens from."""
    stored: Sequence[CachedLatents | RoundedRows] = ()
    """What is kept of each request, where that is not as computed: latents in fp8, and what
    numerics `published` have rounded."""

    def only(self, i: int) -> EngineRun:
        """Request i's."""
        one = [self.tokens[i]], [self.logits[i]], [self.cached[i]], [self.outputs[i]]
        return EngineRun(*one, self.core)

    def logprobs(self, i: int) -> Tensor:
        """[positions, vocabulary] of request i; every position must have been computed or
        cached, the last sampled token excepted."""
        rows = self.logits[i]
        return torch.stack([rows[p] for p in sorted(rows)]).double().log_softmax(-1)

    def reference(self, model: Path, dtype: torch.dtype = torch.float64) -> Reference:
        """Whose products are with activations as computed."""
        numerics = PUBLISHED if self.core.plan.numerics.name == PUBLISHED else "weights"
        return reference.load(model, dtype, numerics, **self.core.config.facts)

    def expected(self, made: Reference, i: int, sequence: Tensor) -> Tensor:
        """Logprobs of the reference over what is stored of request i."""
        with torch.no_grad(), self.stored[i].attended() if self.stored else nullcontext():
            return made.logprobs(sequence)


def run(model: Path, asks: Sequence[Ask], config: EngineConfig, **changes: Any) -> EngineRun:
    """Serve `asks` with greedy sampling (unless they say otherwise) and watch every logit."""
    core = load_engine(model, replace(config, **changes)).core
    try:
        return serve(core, asks)
    finally:
        close(core)


def close(core: EngineCore) -> None:
    try:
        core.close()
    except EngineBroken as error:
        raise CheckFailed(str(error)) from error


Observer = Callable[[Batch, Mapping[int, int]], None]
"""Called after each step with its batch, and the request of each row's id."""


def serve(
    core: EngineCore,
    asks: Sequence[Ask],
    on_step: Callable[[EngineCore, int], None] | None = None,
    *,
    observer: Observer | None = None,
    may_fail: bool = False,
) -> EngineRun:
    """All of them, to their end. A request that ends with an error fails the check, unless it
    `may_fail`."""
    logits: list[dict[int, Tensor]] = [{} for _ in asks]
    first: list[dict[int, Tensor]] = [{} for _ in asks]
    ids: dict[int, int] = {}
    recorder = LatentRecorder.of(core) or RowRecorder.of(core)

    def watch(batch: Batch, values: Tensor) -> None:
        if recorder is not None:
            recorder.take(batch)
        for row in batch.rows:
            mine, earlier = logits[ids[row.id]], first[ids[row.id]]
            for position, value in enumerate(values[row.tokens], row.start):
                if position in mine:
                    earlier.setdefault(position, mine[position])
                mine[position] = value.clone()
        if observer is not None:
            observer(batch, ids)

    local_runner(core.executor).probe = watch
    outputs: list[list[CoreOutput]] = [[] for _ in asks]
    waiting = sorted(range(len(asks)), key=lambda i: asks[i].arrives)
    step = 0
    while waiting or core.has_unfinished():
        while waiting and asks[waiting[0]].arrives <= step:
            i = waiting.pop(0)
            ids[core.add(request_of(i, asks[i]))] = i
        if on_step:
            on_step(core, step)
        for output in _step(core, may_fail):
            outputs[int(output.request_id.removeprefix("check-"))].append(output)
        step += 1
        if step > 100_000:
            raise CheckFailed("the engine made no progress")
    local_runner(core.executor).probe = None
    if isinstance(recorder, LatentRecorder):
        recorder.close()
    tokens = [[token for output in each for token in output.token_ids] for each in outputs]
    cached = [max((output.num_cached_tokens for output in each), default=0) for each in outputs]
    numbers = sorted(ids, key=lambda number: ids[number])
    stored = [recorder.kept(number) for number in numbers] if recorder else []
    return EngineRun(tokens, logits, cached, outputs, core, first, stored)


def _step(core: EngineCore, may_fail: bool) -> list[CoreOutput]:
    """An engine that stops itself has failed the check, whatever it says."""
    try:
        outputs = core.step()
    except EngineBroken as error:
        raise CheckFailed(f"the engine stopped: {error}") from error
    for output in outputs:
        if output.error and not may_fail:
            raise CheckFailed(f"the engine stopped: {output.error}")
    return outputs


def request_of(i: int, ask: Ask) -> CoreRequest:
    options: JSON = {
        "temperature": 0.0,
        "ignore_eos": True,
        "max_tokens": ask.max_tokens,
    } | ask.params
    return CoreRequest(
        request_id=f"check-{i}",
        prompt_token_ids=ask.prompt,
        params=SamplingParams(**options),
        priority=ask.priority,
        cache_salt=ask.cache_salt,
        eos_token_ids=ask.eos_token_ids,
        bad_word_ids=ask.bad_word_ids,
    )


# -- the checks ------------------------------------------------------------------------


def oracle(model: Path, asks: Sequence[Ask], done: EngineRun) -> float:
    """Every position of every request equals the reference; the largest difference."""
    exact, worst = done.reference(model), 0.0
    for i, ask in enumerate(asks):
        sequence = torch.tensor([*ask.prompt, *done.tokens[i]][:-1])
        rows = done.logits[i]
        missing = set(range(done.cached[i], len(sequence))) - rows.keys()
        if missing:
            raise CheckFailed(f"oracle: request {i}: positions {sorted(missing)[:4]} not computed")
        wanted = done.expected(exact, i, sequence)
        at = [p for p in sorted(rows) if p < len(sequence)]
        ours = torch.stack([rows[p] for p in at]).double().log_softmax(-1)
        gate = ORACLE_GATE
        if not bool((ours - wanted[at]).abs().max() <= gate):
            gate = _gate_of_noise(model, done, i, sequence, wanted)
        worst = max(worst, _distance(f"oracle: request {i}", ours, wanted[at], at, gate))
    return worst


def _gate_of_noise(model: Path, done: EngineRun, i: int, sequence: Tensor, exact: Tensor) -> float:
    rough = done.expected(done.reference(model, torch.float32), i, sequence)
    noise = float((rough.double() - exact).abs().max())
    return max(ORACLE_GATE, min(NOISE * noise, MOST_NOISE))


def same(what: str, one: EngineRun, two: EngineRun, *, bitwise: bool = False) -> float:
    """Two runs of the same requests: the same tokens, and logits within the band or bit by bit."""
    worst = 0.0
    for i, (a, b) in enumerate(zip(one.logits, two.logits, strict=True)):
        if one.tokens[i] != two.tokens[i]:
            raise CheckFailed(
                f"{what}: request {i}: tokens differ: {one.tokens[i]} and {two.tokens[i]}"
            )
        at = sorted(a.keys() & b.keys())
        if not at:
            raise CheckFailed(f"{what}: request {i}: no position in common")
        left, right = (torch.stack([rows[p] for p in at]) for rows in (a, b))
        if bitwise and not torch.equal(left, right):
            first = int((left != right).any(-1).nonzero()[0])
            raise CheckFailed(f"{what}: request {i}: position {at[first]}: bits differ")
        left, right = (rows.double().log_softmax(-1) for rows in (left, right))
        worst = max(worst, _distance(f"{what}: request {i}", left, right, at, BAND))
    return worst


def same_bits_under(
    model: Path,
    asks: Sequence[Ask],
    config: EngineConfig,
    schedules: Mapping[str, JSON],
) -> None:
    """Batch-invariant mode: exact once, and then bit by bit the same under every schedule (changes
    of `config`, by name), and for each request alone."""
    first = run(model, asks, config)
    oracle(model, asks, first)
    for name, changes in schedules.items():
        same(name, run(model, asks, config, **changes), first, bitwise=True)
    for i, ask in enumerate(asks):
        alone = run(model, [replace(ask, arrives=0)], config)
        one = EngineRun([first.tokens[i]], [first.logits[i]], [0], [[]], first.core)
        same("alone", alone, one, bitwise=True)


def decode_is_prefill(model: Path, ask: Ask, config: EngineConfig) -> None:
    """What decode computes for its own answer, prefill computes for the same tokens."""
    decoded = run(model, [ask], config)
    prefilled = run(model, [Ask([*ask.prompt, *decoded.tokens[0]], 1)], config)
    logits = [{p: row for p, row in prefilled.logits[0].items() if p in decoded.logits[0]}]
    again = EngineRun(decoded.tokens, logits, [0], [[]], prefilled.core)
    same("decode = prefill", again, decoded, bitwise=config.batch_invariant)


def _distance(what: str, ours: Tensor, theirs: Tensor, at: list[int], gate: float) -> float:
    off = (ours - theirs).abs().amax(-1)
    worst = int(off.argmax())
    kind = "engine = reference" if what.startswith("oracle") else "engine = engine"
    bounds.record(kind, float(off.max()) / gate)
    if not bool(off.max() <= gate):  # also when NaN
        raise CheckFailed(
            f"{what}: position {at[worst]}: logprobs differ by {float(off[worst]):.3g}, "
            f"accepted {gate:g}"
        )
    return float(off.max())
