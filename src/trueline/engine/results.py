"""What a launched step gives, once the device is done with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from trueline.device import mark, to_host
from trueline.engine.batch import SamplingPoint
from trueline.engine.canaries.guard import Check
from trueline.engine.messages import StepResult, TokenScore
from trueline.engine.no_token_left import no_token_left
from trueline.ops.sampling import SamplingState, Scored


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """On the device, one for each row that samples."""

    tokens: Tensor
    bad: Tensor
    scored: Scored | None
    """Where a row asked for logprobs."""


class PromptScores:
    """Of one row's prompt tokens in this step."""

    def __init__(self, row: int, top: int) -> None:
        self.row, self.top = row, top
        self._parts: list[tuple[list[int], Scored]] = []

    def add(self, targets: list[int], scored: Scored) -> None:
        self._parts.append((targets, _fetched(scored)))

    def scores(self) -> list[TokenScore]:
        return [
            score
            for targets, scored in self._parts
            for score in token_scores(targets, scored, [self.top] * len(targets))
        ]


class StepHandle:
    """A step in flight. Copies to the host are under way from the start, so that waiting for them
    waits for this step and for none after it."""

    def __init__(
        self,
        points: tuple[SamplingPoint, ...],
        states: list[SamplingState],
        sampled: SampledTokens | None,
        prompts: list[PromptScores],
        check: Check | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`states`: of each point's sequence. `check`: of the canaries, where one was due."""
        self._points, self._states, self._prompts = points, states, prompts
        self._check, self._vocab_size = check, vocab_size
        self._result: StepResult | None = None
        self._sampled = sampled
        if sampled is not None:
            scored = None if sampled.scored is None else _fetched(sampled.scored)
            self._sampled = SampledTokens(to_host(sampled.tokens), to_host(sampled.bad), scored)
        self._wait = mark()

    def result(self) -> StepResult:
        """Waits if need be; the same object however often it is asked for."""
        if self._result is None:
            self._wait()
            if self._check is not None:
                self._check.settle()
            self._result = self._fetch()
        return self._result

    def _fetch(self) -> StepResult:
        result = StepResult(prompt_scores={each.row: each.scores() for each in self._prompts})
        if self._sampled is None:
            return result
        tokens, bad = self._sampled.tokens.tolist(), self._sampled.bad.tolist()
        if self._sampled.scored is None:
            scores = [TokenScore(token, math.nan, 0) for token in tokens]
        else:
            wanted = [state.params.logprobs for state in self._states]
            scores = token_scores(tokens, self._sampled.scored, wanted)
        rejected: set[int] = set()
        for i, (point, state) in enumerate(zip(self._points, self._states, strict=True)):
            if point.row in rejected:
                continue
            unmet = no_token_left(state, self._vocab_size) if bad[i] else ""
            state.append(tokens[i], bad=bool(bad[i]))
            state.position += bool(point.drafts)  # beyond the one that was certain
            if unmet:
                result.unmet[point.row] = unmet
            elif bad[i]:
                result.bad.append(point.row)
            else:
                result.sampled.setdefault(point.row, []).append(scores[i])
            if state.guide is not None and state.guide.complete:
                result.complete.append(point.row)
            elif state.guide is not None and state.guide.problem:
                kind = result.unmet if state.guide.too_complex else result.stuck
                kind[point.row] = state.guide.problem
            if bad[i] or not accepts(tokens[i], point):
                rejected.add(point.row)
        return result


def accepts(token: int, point: SamplingPoint) -> bool:
    """Whether what the row computed after this point is what this token leads to."""
    return token == point.draft


def _fetched(scored: Scored) -> Scored:
    return Scored(
        to_host(scored.logprobs),
        to_host(scored.ranks),
        to_host(scored.top_ids),
        to_host(scored.top_logprobs),
    )


def token_scores(tokens: list[int], scored: Scored, wanted: list[int | None]) -> list[TokenScore]:
    """`wanted`: how many of the likeliest each row asked for; -1 is all, None nothing."""
    values, ranks = scored.logprobs.tolist(), scored.ranks.tolist()
    if not any(wanted):
        return [TokenScore(*each) for each in zip(tokens, values, ranks, strict=True)]
    likely = zip(scored.top_ids.tolist(), scored.top_logprobs.tolist(), strict=True)
    tops = [
        list(zip(ids, numbers, strict=True))[: None if count == -1 else count or 0]
        for (ids, numbers), count in zip(likely, wanted, strict=True)
    ]
    return [TokenScore(*each) for each in zip(tokens, values, ranks, tops, strict=True)]
