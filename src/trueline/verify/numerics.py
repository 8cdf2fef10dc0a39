"""Numerics `activations` and `published` of the running engine against the reference's, in float64.

Rounding to fp8 makes a jump of the smallest difference: where an input is as near to the middle
between two codes as float32 errs, the engine may take the other code, and that position and those
after it differ by a step of fp8. Such inputs are few, and most requests of the checks are short:
the reference in float32, which shares no code with the engine, differs from itself in float64 at
5 % of the positions of these requests, and at 33 % with the worst of 60 tiny models. So half of the
positions or more must equal the reference as in any other numerics. All must stay inside of the
numerics' noise band: what they do to this model, by the reference in both of them. It is computed
for each model, and is the same on every machine.

Rows that `published` rounds are kept, so that the reference can attend to just those: then every
position is within the gate (`rounded_rows.py`). By itself it is held against the engine as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trueline import reference
from trueline.reference import Reference
from trueline.reference.functional import Fp8Inputs
from trueline.utils.json_types import JSON
from trueline.verify import bounds
from trueline.verify.cases import Subject
from trueline.verify.engine import ORACLE_GATE, Ask, EngineRun, oracle, run, same
from trueline.verify.failed import CheckFailed
from trueline.verify.ranks import ranks_are_as_one
from trueline.verify.schedules import (
    MIXED,
    base,
    bits_are_the_rows_own,
    preempted_resumes,
    prefix_is_cold,
    prompt,
)

ASKS = [
    Ask(prompt(60), 5),
    *(Ask(prompt(1 + i % 5, seed=i), 2 + i % 3, arrives=i // 4) for i in range(24)),
]
CHUNKED: JSON = {"max_num_batched_tokens": 29, "block_size": 3}
FEW = 0.25
"""The part of the band's mean that is accepted: positions that jump are few."""
ROUTED = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Noise:
    """How far next-token distributions are from exact ones."""

    positions: int
    mean_kl: float
    """Exact to these, in nats."""
    worst_kl: float
    top1: float
    """The share of positions with the same likeliest token."""

    @classmethod
    def of(cls, exact: Tensor, logprobs: Tensor) -> Noise:
        """Of [positions, vocabulary] each."""
        kl = (exact.exp() * (exact - logprobs)).sum(-1).clamp_min(0)
        alike = exact.argmax(-1) == logprobs.argmax(-1)
        return cls(len(kl), float(kl.mean()), float(kl.max()), float(alike.double().mean()))

    def as_json(self) -> JSON:
        return asdict(self)


def load_activations(model: Path, **facts: Any) -> Reference:
    """The reference as the engine multiplies: fp4, which the published inference of DeepSeek-V4
    multiplies with fp8 too, is weight-only."""
    made = reference.load(model, numerics="activations", **facts)
    assert isinstance(made.params, Fp8Inputs)
    if made.config.quantised.fp4_experts:
        modules = made.params.modules
        made.params.modules = frozenset(name for name in modules if not ROUTED.search(name))
    return made


DEFINED: dict[str, Callable[..., Reference]] = {
    "activations": load_activations,
    "published": partial(reference.load, numerics="published"),
}
"""By numerics."""


def exact_logprobs(model: Path, sequences: Sequence[Tensor], **facts: Any) -> list[Tensor]:
    """Of the reference in float64, numerics `weights`."""
    plain = reference.load(model, **facts)
    return [_logprobs(plain, sequence) for sequence in sequences]


def fp8_activations(subject: Subject) -> None:
    """Mixed steps and chunked prefill."""
    config = replace(base(subject), numerics="activations")
    numerics_oracle(subject.model, ASKS, run(subject.model, ASKS, config, **CHUNKED))


def fp8_activations_bitwise(subject: Subject) -> None:
    """Batch-invariant mode: right, and the same bits whatever the steps and the ranks are."""
    config = replace(base(subject), numerics="activations", batch_invariant=True)
    whole = run(subject.model, ASKS, config)
    numerics_oracle(subject.model, ASKS, whole)
    split = run(subject.model, ASKS, config, **CHUNKED)
    same("fp8 activations, split = whole", split, whole, bitwise=True)
    ranks_are_as_one(subject.model, ASKS[:6], config, 2)


def published_rounding(subject: Subject) -> None:
    """Mixed steps and chunked prefill, NaN in every byte that no request owns."""
    config = replace(base(subject), numerics="published", poison=True)
    done = run(subject.model, ASKS, config, **CHUNKED)
    oracle(subject.model, ASKS, done)
    numerics_oracle(subject.model, ASKS, done)


def published_rounding_bitwise(subject: Subject) -> None:
    """Batch-invariant mode: bit by bit the same, split or whole, alone or together, after a prefix
    hit, after preemption, and on two ranks."""
    options = subject.options | {"numerics": "published", "batch_invariant": True}
    rounded = replace(subject, options=options)
    bits_are_the_rows_own(rounded)
    prefix_is_cold(rounded, bitwise=True)
    preempted_resumes(rounded)
    ranks_are_as_one(subject.model, MIXED[:2], base(rounded), 2)


def numerics_oracle(model: Path, asks: Sequence[Ask], done: EngineRun) -> Noise:
    """Every request, prompts and answers each; how far all positions are from the reference."""
    plan = done.core.plan.numerics
    if plan.name not in DEFINED:
        raise CheckFailed(f"fp8 activations: the plan has {plan}")
    exact = DEFINED[plan.name](model, **done.core.config.facts)
    sequences = [
        torch.tensor([*ask.prompt, *tokens][:-1])
        for ask, tokens in zip(asks, done.tokens, strict=True)
    ]
    wanted = [_logprobs(exact, sequence) for sequence in sequences]
    ours = [_computed(done, i, len(sequence)) for i, sequence in enumerate(sequences)]
    for what, parts in (
        ("prompts", [slice(0, len(ask.prompt)) for ask in asks]),
        ("answers", [slice(len(ask.prompt), None) for ask in asks]),
    ):
        pairs = zip(ours, wanted, parts, strict=True)
        off = [(a[part] - b[part]).abs().amax(-1) for a, b, part in pairs]
        _require_half(f"{plan.name}: {what}", torch.cat(off))
    noise = Noise.of(torch.cat(wanted), torch.cat(ours))
    unquantised = exact_logprobs(model, sequences, **done.core.config.facts)
    _require_inside(plan.name, noise, Noise.of(torch.cat(wanted), torch.cat(unquantised)))
    return noise


def _logprobs(made: Reference, sequence: Tensor) -> Tensor:
    with torch.no_grad():
        return made.logprobs(sequence)


def _computed(done: EngineRun, i: int, length: int) -> Tensor:
    rows = done.logits[i]
    missing = set(range(length)) - rows.keys()
    if missing:
        raise CheckFailed(f"numerics: request {i}: {sorted(missing)[:4]} not computed")
    return torch.stack([rows[p] for p in range(length)]).double().log_softmax(-1)


def _require_half(what: str, off: Tensor) -> None:
    middle = float(off.median())
    bounds.record("numerics, the median", middle / ORACLE_GATE)
    if not middle <= ORACLE_GATE:  # also when NaN
        raise CheckFailed(
            f"{what}: half of the positions differ by {middle:.3g} in logprob or more, accepted "
            f"{ORACLE_GATE:g}"
        )


def _require_inside(what: str, noise: Noise, band: Noise) -> None:
    for figure, ours, most in (
        ("worst", noise.worst_kl, band.worst_kl),
        ("mean", noise.mean_kl, FEW * band.mean_kl),
    ):
        bounds.record(f"numerics, {figure} KL", ours / most)
        if not ours <= most:  # also when NaN
            raise CheckFailed(f"{what}: {figure} KL {ours:.3g}, accepted {most:.3g}")


NUMERICS_CHECKS: dict[str, Callable[[Subject], None]] = {
    "fp8 activations": fp8_activations,
    "fp8 activations, bitwise": fp8_activations_bitwise,
}
PUBLISHED_CHECKS: dict[str, Callable[[Subject], None]] = {
    "published rounding": published_rounding,
    "published rounding, bitwise": published_rounding_bitwise,
}
"""Of DeepSeek-V4."""
