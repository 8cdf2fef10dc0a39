"""What a launched step gives, once the device is done with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from trueline.device import mark, to_host
from trueline.engine.messages import CoreRequest, TokenScore
from trueline.ops.sampling import RowState, Scored


@dataclass(slots=True)
class Result:
    """Per request: the sampled token with its scores, or why there is none."""

    samples: dict[str, TokenScore] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """NaN or infinite logits: never a random token."""
    prompt_scores: dict[str, tuple[int, list[TokenScore]]] = field(default_factory=dict)
    """Position of the first, and the scores of the tokens after each."""


@dataclass(slots=True)
class Story:
    """What sampling needs to know of a request; its outputs grow as results are fetched, ahead of
    what the core has collected."""

    request: CoreRequest
    output_ids: list[int]
    row: RowState


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device, a row per sample."""

    tokens: Tensor
    bad: Tensor
    scored: Scored | None
    """Where a row asked for logprobs."""


class PromptScores:
    """Of one request's prompt tokens in this step."""

    def __init__(self, name: str, start: int, top: int) -> None:
        self.name, self.start, self.top = name, start, top
        self._parts: list[tuple[list[int], Scored]] = []

    def add(self, targets: list[int], scored: Scored) -> None:
        self._parts.append((targets, _fetched(scored)))

    def scores(self) -> list[TokenScore]:
        return [
            score
            for targets, scored in self._parts
            for score in token_scores(targets, scored, [self.top] * len(targets))
        ]


class Pending:
    """A step in flight. Copies to the host are under way from the start, so that waiting for them
    waits for this step and for none after it."""

    def __init__(
        self,
        names: list[str],
        stories: list[Story],
        drawn: Drawn | None,
        prompts: list[PromptScores],
    ) -> None:
        self._names, self._stories, self._prompts = names, stories, prompts
        self._result: Result | None = None
        self._drawn = drawn
        if drawn is not None:
            scored = None if drawn.scored is None else _fetched(drawn.scored)
            self._drawn = Drawn(to_host(drawn.tokens), to_host(drawn.bad), scored)
        self._wait = mark()

    def result(self) -> Result:
        """Waits if need be; the same object however often it is asked for."""
        if self._result is None:
            self._wait()
            self._result = self._fetch()
        return self._result

    def _fetch(self) -> Result:
        result = Result()
        for prompt in self._prompts:
            result.prompt_scores[prompt.name] = (prompt.start, prompt.scores())
        if self._drawn is None:
            return result
        tokens, bad = self._drawn.tokens.tolist(), self._drawn.bad.tolist()
        if self._drawn.scored is None:
            scores = [TokenScore(token, math.nan, 0) for token in tokens]
        else:
            wanted = [story.request.params.logprobs for story in self._stories]
            scores = token_scores(tokens, self._drawn.scored, wanted)
        for i, (name, story) in enumerate(zip(self._names, self._stories, strict=True)):
            story.output_ids.append(tokens[i])
            if bad[i]:
                result.broken.add(name)
            else:
                result.samples[name] = scores[i]
        return result


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
