"""The next token's distribution against the definition's own forward, and where it differs most."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.text.tokenizer import Tokenizer
from trueline.verify.report import Alternative, Measure, Place, TokenDiff
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.judgement import FACTOR
from trueline.verify.suite.numbers import Numbers
from trueline.verify.suite.outcome import Outcome, Wrong

SHOWN_DIFFS, SHOWN_TOKENS = 6, 5


def kl(exact: Tensor, ours: Tensor) -> Tensor:
    """[T]: of the definition's distribution to ours."""
    return (exact.exp() * (exact - ours)).nan_to_num(0.0).sum(-1).clamp_min(0)


def logits(numbers: Numbers, composition: Composition) -> Outcome:
    numbers.run(composition)
    observed = numbers.ran[composition.name].requests.observed[0]
    assert numbers.bands is not None, "noise is measured with the first composition"
    exact, rough = numbers.bands.forward[composition.name, 0]
    at = [p for p in observed.computed if p in observed.logits]
    ours = torch.stack([observed.logits[p] for p in at]).double().log_softmax(-1)
    measures, far = [], False
    for name, mine, noise in (
        ("KL, mean", kl(exact[at], ours).mean(), kl(exact, rough).mean()),
        ("KL, 99.9 %", kl(exact[at], ours).quantile(0.999), kl(exact, rough).quantile(0.999)),
        ("KL, worst token", kl(exact[at], ours).max(), kl(exact, rough).max()),
        (
            "logprob, worst",
            (exact[at] - ours).abs().max(),
            (exact - rough).abs().max(),
        ),
    ):
        # a distribution's distance goes with the square of its logits'
        power = 2 if name.startswith("KL") else 1
        floor = float(torch.finfo(torch.float32).eps) ** power
        gate = FACTOR**power * max(float(noise), floor)
        worst = at[int(kl(exact[at], ours).argmax())]
        place = Place(
            composition=composition.name, request=0, position=worst, part="logits",
            path=observed.paths.get(worst),
        )  # fmt: skip
        measures.append(Measure(
            name=name, value=float(mine), band=float(noise), gate=gate, place=place
        ))  # fmt: skip
        far = far or not float(mine) <= gate
    same = (exact[at].argmax(-1) == ours.argmax(-1)).double().mean()
    measures.append(Measure(name="top-1 agreement", value=float(same)))
    if far:
        bad = next(m for m in measures if m.gate is not None and not m.value <= m.gate)
        raise Wrong(
            f"oracle: {bad.place}: {bad.name} {bad.value:.3g}, accepted {bad.gate:.3g}",
            bad.place,
            measures,
        )
    return Outcome(f"{len(at)} positions, {100 * float(same):.1f} % agree in the likeliest token",
                   measures)  # fmt: skip


def token_diffs(numbers: Numbers, composition: str, tokenizer: Tokenizer | None) -> list[TokenDiff]:
    """The positions whose distributions are furthest apart."""
    ran, judgement = numbers.ran[composition], numbers.judged[composition]
    found: list[TokenDiff] = []
    for i, observed in enumerate(ran.requests.observed):
        exact = judgement.logits.get((composition, i))
        if exact is None:
            continue
        exact = exact.log_softmax(-1)
        at = [p for p in observed.computed if p in observed.logits]
        if not at:
            continue
        ours = torch.stack([observed.logits[p] for p in at]).double().log_softmax(-1)
        far = kl(exact[at], ours)
        for n in far.argsort(descending=True)[:SHOWN_DIFFS].tolist():
            place = Place(
                composition=composition, request=i, position=at[n], path=observed.paths.get(at[n])
            )
            found.append(TokenDiff(
                place=place,
                before=_text(tokenizer, observed.tokens[max(0, at[n] - 12) : at[n] + 1]),
                ours=_top(ours[n], tokenizer),
                reference=_top(exact[at[n]], tokenizer),
                kl=float(far[n]),
            ))  # fmt: skip
    return sorted(found, key=lambda diff: -diff.kl)[:SHOWN_DIFFS]


def _top(row: Tensor, tokenizer: Tokenizer | None) -> list[Alternative]:
    values, ids = row.topk(min(SHOWN_TOKENS, len(row)))
    return [
        Alternative(token, _text(tokenizer, [token]), value)
        for token, value in zip(ids.tolist(), values.tolist(), strict=True)
    ]


def _text(tokenizer: Tokenizer | None, tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens, False)
