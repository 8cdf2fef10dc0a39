"""Captured decode steps. What happens inside of a graph cannot be watched, so logits are compared
with those of the same requests in eager steps, which are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueline.engine.executor import local_runner
from trueline.engine.graphs import DecodeGraphs
from trueline.verify.engine import EngineRun, serve
from trueline.verify.report import Measure, Place
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.judgement import FACTOR
from trueline.verify.suite.outcome import Outcome, Wrong

if TYPE_CHECKING:
    from trueline.verify.suite.numbers import Numbers


def check(numbers: Numbers, composition: Composition) -> Outcome:
    session = numbers.session
    if not session.plan.graphs:
        where = "eager steps were asked for" if session.plan.device.is_gpu else "a CPU has none"
        raise NotForced(f"no captured steps: {where}")
    eager = compositions.run(session, composition)
    seen: set[str] = set()
    with session.core(enforce_eager=False) as core:
        graphs = local_runner(core.executor).graphs
        assert graphs is not None, "the plan has them"
        graphs.run = watched(graphs, seen)  # type: ignore[method-assign]
        done = serve(core, composition.asks)
    if not seen:
        raise NotForced("no step was replayed")
    measure = compare(numbers, composition, eager.done, done)
    if not measure.good:
        raise Wrong(
            f"graph = eager: {measure.place}: logprobs differ by {measure.value:.3g}, accepted "
            f"{measure.gate:.3g}",
            measure.place,
            [measure],
        )
    return Outcome(f"replayed: {', '.join(sorted(seen))}", [measure])


def watched(graphs: DecodeGraphs, seen: set[str]) -> Callable[..., Any]:
    plain = graphs.run

    def run(batch: Any, *given: Any) -> Any:
        made = plain(batch, *given)
        seen.add(f"{len(batch.rows)} rows in a graph for {made.key.size}")
        return made

    return run


def compare(
    numbers: Numbers, composition: Composition, eager: EngineRun, replayed: EngineRun
) -> Measure:
    """The worst logprob, up to where two answers part: near-ties may decide otherwise."""
    assert numbers.bands is not None, "noise is measured with the first composition"
    exact, rough = next(iter(numbers.bands.forward.values()))
    band = float((exact - rough).abs().max())
    worst, place = 0.0, Place(composition=composition.name, part="logits", path="captured")
    for i, (a, b) in enumerate(zip(eager.logits, replayed.logits, strict=True)):
        prompt = len(composition.asks[i].prompt)
        pairs = zip(eager.tokens[i], replayed.tokens[i], strict=True)
        same = next((n for n, (x, y) in enumerate(pairs) if x != y), len(eager.tokens[i]))
        for p in sorted(p for p in a.keys() & b.keys() if p < prompt + same):
            left, right = (row[p].double().log_softmax(-1) for row in (a, b))
            off = float((left - right).abs().max())
            if not off <= worst:  # also NaN
                worst = off
                place = Place(
                    composition=composition.name, part="logits", path="captured",
                    request=i, position=p,
                )  # fmt: skip
    floor = float(torch.finfo(torch.float32).eps)
    return Measure(
        name="logprob, worst", value=worst, band=band, gate=FACTOR * max(band, floor), place=place
    )
