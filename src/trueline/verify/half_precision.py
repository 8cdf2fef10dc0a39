"""16-bit engines against float64: expert choices and selections are replayed from a float32 run, so
that no near-tie decides, and the answers' tokens are given, so that all see the same sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.layers.context import RecordedChoices
from trueline.verify.cases import Subject
from trueline.verify.engine import Ask, EngineRun, oracle, serve
from trueline.verify.failed import CheckFailed
from trueline.verify.schedules import base, prompt

Half = Literal["bfloat16", "float16"]
ASKS = [
    Ask(prompt(40), 6, params={"allowed_token_ids": [17]}),
    Ask(prompt(1), 9, arrives=1, params={"allowed_token_ids": [230]}),
    Ask(prompt(90), 4, arrives=2, params={"allowed_token_ids": [3]}),
]


def half_is_float64(subject: Subject, dtype: Half, band: float) -> float:
    """Logprobs of every position; the float32 run that gave the choices is itself within the
    oracle's gate of float64. The largest difference, which must be inside the band."""
    exact = _served(subject, "float32", None)
    oracle(subject.model, ASKS, exact[0])
    ours, _ = _served(subject, dtype, exact[1])
    worst = 0.0
    for i in range(len(ASKS)):
        if ours.tokens[i] != exact[0].tokens[i]:
            raise CheckFailed(f"half precision: request {i}: other tokens than those allowed")
        left, right = ours.logprobs(i), exact[0].logprobs(i)
        off = (left - right).abs().amax(-1)
        if not bool(off.max() <= band):  # also when NaN
            at = int(off.argmax())
            raise CheckFailed(
                f"half precision: {dtype}: request {i}, position {at}: off by "
                f"{float(off[at]):.3g} in logprob, accepted {band:g}"
            )
        worst = max(worst, float(off.max()))
    return worst


def _served(
    subject: Subject, dtype: Half | Literal["float32"], choices: list[RecordedChoices] | None
) -> tuple[EngineRun, list[RecordedChoices]]:
    core = load_engine(subject.model, replace(base(subject), dtype=dtype)).core
    if choices is None:
        local_runner(core.executor).recorded = []
    else:
        local_runner(core.executor).forced = [_copied(step) for step in choices]
    try:
        done = serve(core, ASKS)
    finally:
        core.close()
    return done, local_runner(core.executor).recorded or []


def _copied(step: RecordedChoices) -> RecordedChoices:
    """Forcing takes choices out of the lists."""
    return RecordedChoices(dict(step.experts), list(step.positions))
