"""What requests ask for beside a prompt: which tokens they may draw, how, when they end, and what
is told of each. Here is its definition in plain Python, from the logits that the engine has
computed; all
that it shares with the engine's sampling is its reference's formula of the noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trueline.engine.messages import TokenScore
from trueline.engine.params import SamplingParams
from trueline.errors import RequestRejected, UsageError
from trueline.ops.sampling.reference import noise
from trueline.verify.engine import Ask, EngineRun, request_of, serve
from trueline.verify.report import Place
from trueline.verify.suite import compositions
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.outcome import Outcome, Todo, Wrong
from trueline.verify.suite.session import Session
from trueline.verify.suite.small_parts import small_parts

INVARIANT = "answer = request"
TOLD = 1e-4
"""A logprob is told in float32."""
TIE = 1e-9
"""Two orders of the same sums in float64."""
FLAT = 100.0
"""A temperature at which any model's draws are nearly even."""
FEW = 40
"""Tokens that requests with noise may draw: noise is computed one by one here."""
PROMPT = 9


def checks(session: Session) -> Iterator[Todo]:
    yield Todo(
        "answers/parameters",
        INVARIANT,
        "every token of requests with penalties, words and tokens that are forbidden or allowed, "
        "least lengths, ends, filters and seeds; logprobs as they are told",
        lambda: parameters(session, overlap=False),
    )
    yield Todo(
        "answers/parameters, one step ahead",
        INVARIANT,
        "the same while the host schedules a step before the last one's tokens are known, in small "
        "parts of rows and vocabulary",
        lambda: parameters(session, overlap=True),
    )
    yield Todo(
        "answers/prompt logprobs",
        INVARIANT,
        "each prompt token's logprob is told once: of a prompt that is in the prefix cache, in "
        "chunks, and of requests that are preempted",
        lambda: prompt_logprobs(session),
    )


def parameters(session: Session, *, overlap: bool) -> Outcome:
    told: list[str] = []
    try:
        sizes = small_parts() if overlap else nullcontext()
        with sizes, session.core(overlap=overlap) as core:
            likely = serve(core, [Ask(session.tokens(PROMPT, 50), 8)]).tokens[0]
            asks = list(requests(session, likely))
            # a step waits for the tokens that one of its rows must know: without such rows too
            for some in (asks, [ask for ask in asks if not _looks_back(ask)]):
                done = serve(core, some)
                for i in range(len(some)):
                    judge(some, done, i)
                _require_other_noise(done)
                told.append(f"{len(some)} requests, {sum(map(len, done.tokens))} tokens")
    except (UsageError, RequestRejected) as error:
        raise NotForced(f"the engine refuses it: {error}") from error
    return Outcome(f"{'; '.join(told)}; overlap={overlap}")


def _looks_back(ask: Ask) -> bool:
    return bool(ask.bad_word_ids) or "repetition_penalty" in ask.params


def requests(session: Session, likely: Sequence[int]) -> Iterator[Ask]:
    """`likely`: what follows the first prompt if nothing is asked."""
    vocab = session.spec.vocab.total
    one, two, three = likely[:3]
    other, end = (one + 1) % vocab, (one + 2) % vocab
    prompt = session.tokens(PROMPT, 50)
    few = [token % vocab for token in session.drawn.tokens(FEW, 51)]
    # two of them arrive while the others decode, so that steps are mixed
    yield Ask(prompt, 6, bad_word_ids=[[one]])
    yield Ask(prompt, 6, bad_word_ids=[[two, three], [other, end, other]])
    yield Ask(prompt, 6, bad_word_ids=[[one, two], [one, other], [one, two, three]])
    # `end` is the likeliest wherever it is allowed
    forced: dict[str, Any] = {"allowed_token_ids": [one, end], "logit_bias": {end: 100.0}}
    yield Ask(prompt, 8, params=forced | {"stop_token_ids": [end], "min_tokens": 3})
    eos = Ask(prompt, 8, eos_token_ids=[end], params=forced | {"ignore_eos": False})
    yield replace(eos, arrives=2)
    yield replace(eos, params=eos.params | {"min_tokens": 2}, arrives=1)
    yield replace(eos, params=eos.params | {"min_tokens": 2, "ignore_eos": True})
    penalties = {"repetition_penalty": 9.0, "presence_penalty": 1.9, "frequency_penalty": 1.6}
    yield Ask(prompt, 8, params={"allowed_token_ids": [*few[:4], *prompt[:4]], **penalties})
    yield Ask(prompt, 8, params={"logprobs": 3, "logit_bias": {other: 5.0}}, arrives=1)
    drawn = {"temperature": 0.8, "seed": 7, "allowed_token_ids": few, "logprobs": 0}
    yield Ask(prompt, 8, params=drawn | {"top_k": 5, "top_p": 0.9})
    yield Ask(prompt, 8, params=drawn | {"min_p": 0.05, "seed": -3}, arrives=3)
    # last: without a seed each has noise of its own
    for _ in range(2):
        yield Ask(prompt, 12, params={"temperature": FLAT})


def _require_other_noise(done: EngineRun) -> None:
    *_, one, two = done.tokens
    if one == two:
        raise Wrong(
            f"{INVARIANT}: two requests without a seed drew the same {len(one)} tokens at "
            f"temperature {FLAT:g}",
            Place(request=len(done.tokens) - 1),
            [],
        )


def prompt_logprobs(session: Session) -> Outcome:
    tight = [
        each for each in compositions.compositions(session)
        if each.name in ("preempt and resume", "preempted within a prompt")
    ]  # fmt: skip
    length = min(2 * session.common_block + 3, session.longest - 16)
    prompt = session.tokens(length, 52)
    told: list[str] = []
    again = [
        Ask(prompt, 2),
        Ask(prompt, 2, params={"prompt_logprobs": 0}, arrives=4),
        Ask(session.tokens(length, 53), 2, params={"prompt_logprobs": 2}),
    ]
    runs = [(again, {"max_num_batched_tokens": 13})] + [
        ([replace(ask, params={"prompt_logprobs": 1}) for ask in each.asks], each.changes)
        for each in tight
    ]
    most = 0
    for asks, changes in runs:
        try:
            with small_parts(), session.core(**changes) as core:
                done = serve(core, asks)
                preempted = core.scheduler.counters.num_preemptions
                most = max(most, preempted)
        except (UsageError, RequestRejected) as error:
            raise NotForced(f"the engine refuses it: {error}") from error
        for i in range(len(asks)):
            judge(asks, done, i)
        told.append(f"{len(asks)} requests, {preempted} preemptions")
    if not most:
        raise NotForced(f"nothing was preempted; right as far as it ran: {'; '.join(told)}")
    return Outcome("; ".join(told))


# -- the definition ------------------------------------------------------------------------


def judge(asks: Sequence[Ask], done: EngineRun, i: int) -> None:
    """Wrong where a token, the end or a logprob of request i is not what it has asked for."""
    ask, tokens = asks[i], done.tokens[i]
    params = request_of(i, ask).params
    outputs = done.outputs[i]
    scores = [score for output in outputs for score in output.scores]
    for n, token in enumerate(tokens):
        at = len(ask.prompt) - 1 + n
        if n and _ends(ask, params, tokens[:n]):
            raise _wrong(i, at, f"it went on behind token {tokens[n - 1]}, which ends it")
        row = done.sampled_from[i].get(at, done.logits[i].get(at))
        if row is None:
            raise _wrong(i, at, f"token {token} was drawn from no logits")
        values = weighed(ask, params, tokens[:n], row)
        if not values[token] >= values.max() - TIE * (1 + abs(float(values.max()))):
            raise _wrong(i, at, f"token {token} was drawn, asked for is {int(values.argmax())}")
        if params.logprobs is not None:
            _check_score(i, at, scores[n], token, [row], params.logprobs)
    ended = "stop" if _ends(ask, params, tokens) else "length"
    reason = outputs[-1].finish_reason
    if reason != ended or (ended == "length" and len(tokens) != ask.max_tokens):
        raise _wrong(i, None, f"it ended after {len(tokens)} tokens by {reason}, not by {ended}")
    _check_prompt(i, ask, params, done)


def _ends(ask: Ask, params: SamplingParams, tokens: Sequence[int]) -> bool:
    eos = () if params.ignore_eos else ask.eos_token_ids
    return len(tokens) >= params.min_tokens and tokens[-1] in (*params.stop_token_ids, *eos)


def weighed(ask: Ask, params: SamplingParams, output: Sequence[int], row: Tensor) -> Tensor:
    """What the next token is the largest of: float64, -inf for those that may not come."""
    x = row.double().clone()
    if params.allowed_token_ids is not None:
        x = torch.full_like(x, -math.inf)
        x[list(params.allowed_token_ids)] = row.double()[list(params.allowed_token_ids)]
    for token in _forbidden(ask, params, output):
        x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*ask.prompt, *output}:
        x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.is_greedy:
        return x
    if params.seed is None:  # the noise is the engine's own
        return torch.zeros_like(x)
    x /= params.temperature
    if params.min_p > 0:
        x[x < x.max() + math.log(params.min_p)] = -math.inf
    order = _likeliest(x, int(x.isfinite().sum()))
    order = order[: params.top_k] if params.top_k > 0 else order
    found, before = torch.full_like(x, -math.inf), 0.0
    for token, share in zip(order, x[order].softmax(0).tolist(), strict=True):
        if before < params.top_p:
            found[token] = x[token] + noise(params.seed, len(ask.prompt) + len(output), token)
        before += share
    return found


def _likeliest(x: Tensor, most: int) -> list[int]:
    """The likeliest first; of equal ones, the lower."""
    order: list[int] = x.sort(descending=True, stable=True).indices[:most].tolist()
    return order


def _forbidden(ask: Ask, params: SamplingParams, output: Sequence[int]) -> Iterator[int]:
    for *start, last in ask.bad_word_ids:
        if len(start) <= len(output) and list(output[len(output) - len(start) :]) == start:
            yield last
    if len(output) < params.min_tokens:
        yield from params.stop_token_ids
        yield from () if params.ignore_eos else ask.eos_token_ids


def _check_score(
    i: int, at: int, score: TokenScore, token: int, rows: Sequence[Tensor], top: int
) -> None:
    """As one of `rows` gives it: of what was computed twice either may be told."""
    for row in rows:
        exact = row.double().log_softmax(0)
        order = _likeliest(exact, top)
        told = [(token, score.logprob), *score.top]
        if (
            (score.token_id, [t for t, _ in score.top]) == (token, order)
            and score.rank == 1 + int((row > row[token]).sum())
            and all(abs(value - float(exact[t])) <= TOLD for t, value in told)
        ):
            return
    raise _wrong(
        i, at, f"of token {token} {score} is told, its logprob is {float(exact[token]):.6f}"
    )


def _check_prompt(i: int, ask: Ask, params: SamplingParams, done: EngineRun) -> None:
    told = [score for output in done.outputs[i] for score in output.prompt_scores]
    wanted = 0 if params.prompt_logprobs is None else len(ask.prompt) - 1
    if len(told) != wanted:
        raise _wrong(i, None, f"{len(told)} logprobs of its prompt are told, not {wanted}")
    for at, score in enumerate(told):
        rows = [each[at] for each in (done.logits[i], done.sampled_from[i]) if at in each]
        if rows:
            assert params.prompt_logprobs is not None
            _check_score(i, at, score, ask.prompt[at + 1], rows, params.prompt_logprobs)


def _wrong(i: int, position: int | None, what: str) -> Wrong:
    place = Place(request=i, position=position, part="logits")
    return Wrong(f"{INVARIANT}: {place}: {what}", place, [])
