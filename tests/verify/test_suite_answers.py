"""verify's definition of what requests ask for: healthy engines pass, and whatever an answer may
have wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from trueline.config import EngineConfig
from trueline.engine.messages import TokenScore
from trueline.verify.cases import make_subject
from trueline.verify.engine import Ask, EngineRun, serve
from trueline.verify.faults.table import FAULTS
from trueline.verify.report import Status
from trueline.verify.suite import answers
from trueline.verify.suite.outcome import Wrong
from trueline.verify.suite.run import Selection, verify
from trueline.verify.suite.session import Session


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_subject("v3-near", tmp_path_factory.mktemp("models") / "v3").model


Answered = tuple[list[Ask], EngineRun]


@pytest.fixture(scope="module")
def answered(model: Path) -> Answered:
    session = Session("v3", model, EngineConfig(max_num_seqs=8))
    with session.core() as core:
        asks = [
            *answers.requests(session, [3, 5, 8]),
            Ask(session.tokens(9), 3, params={"prompt_logprobs": 2, "logprobs": 2}),
        ]
        return asks, serve(core, asks)


def test_a_healthy_engine_passes(model: Path) -> None:
    report = verify(model, EngineConfig(max_num_seqs=8), Selection(only=("answers",)))
    assert [check.status for check in report.checks] == [Status.PASSED] * 3
    assert "1 preemptions" in report.checks[-1].evidence
    assert (
        report.checks[0].evidence == "13 requests, 90 tokens; 9 requests, 64 tokens; overlap=False"
    )


@pytest.mark.parametrize("fault", ["seed-of-place", "seed-ignored", "logprobs-after-bias"])
def test_a_fault_of_answers_is_seen(fault: str, model: Path) -> None:
    (seeded,) = (each for each in FAULTS if each.id == fault)
    with seeded.seeded():
        report = verify(model, EngineConfig(max_num_seqs=8), Selection(only=("answers",)))
    assert {check.invariant for check in report.failed} == {answers.INVARIANT}


def test_every_token_is_what_was_asked_for(answered: Answered) -> None:
    """And no other would be, but of those that draw without a seed."""
    asks, done = answered
    for i, ask in enumerate(asks):
        answers.judge(asks, done, i)
        for n in range(len(done.tokens[i])):
            wrong = replace(done, tokens=deepcopy(done.tokens))
            wrong.tokens[i][n] = (wrong.tokens[i][n] + 1) % 256
            if ask.params.get("temperature") != answers.FLAT:
                with pytest.raises(Wrong):
                    answers.judge(asks, wrong, i)


def test_ends_are_those_that_were_asked_for(answered: Answered) -> None:
    asks, done = answered
    for i, ask in enumerate(asks):
        for reason in {"stop", "length"} - {done.outputs[i][-1].finish_reason}:
            wrong = replace(done, outputs=deepcopy(done.outputs))
            wrong.outputs[i][-1].finish_reason = reason
            with pytest.raises(Wrong, match="it ended after"):
                answers.judge(asks, wrong, i)
        longer = [*asks[:i], replace(ask, max_tokens=ask.max_tokens + 1)]
        if done.outputs[i][-1].finish_reason == "length":
            with pytest.raises(Wrong, match="it ended after"):
                answers.judge(longer, done, i)
    # a request that has gone on behind its end
    i, ended = next(
        (i, t) for i, t in enumerate(done.tokens) if done.outputs[i][-1].finish_reason == "stop"
    )
    wrong = replace(done, tokens=deepcopy(done.tokens), outputs=deepcopy(done.outputs))
    wrong.tokens[i].append(ended[-1])
    with pytest.raises(Wrong, match="it went on behind token"):
        answers.judge(asks, wrong, i)


Change = Callable[[TokenScore], TokenScore]
CHANGES: dict[str, Change] = {
    "logprob": lambda score: msgspec.structs.replace(score, logprob=score.logprob + 1e-3),
    "rank": lambda score: msgspec.structs.replace(score, rank=score.rank + 1),
    "token": lambda score: msgspec.structs.replace(score, token_id=score.token_id + 1),
    "order": lambda score: msgspec.structs.replace(score, top=score.top[::-1]),
    "another's": lambda score: msgspec.structs.replace(
        score, top=[(p, x - 1e-3) for p, x in score.top]
    ),
    "too few": lambda score: msgspec.structs.replace(score, top=score.top[:-1]),
    "NaN": lambda score: msgspec.structs.replace(score, logprob=float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("of", ["scores", "prompt_scores"])
def test_logprobs_are_those_of_the_model(answered: Answered, of: str, change: str) -> None:
    asks, done = answered
    last = len(asks) - 1
    wrong = replace(done, outputs=deepcopy(done.outputs))
    told = next(output for output in wrong.outputs[last] if getattr(output, of))
    getattr(told, of)[-1] = CHANGES[change](getattr(told, of)[-1])
    with pytest.raises(Wrong, match="is told, its logprob is"):
        answers.judge(asks, wrong, last)


@pytest.mark.parametrize("count", [-1, 1])
def test_a_prompt_s_logprobs_are_told_once(answered: Answered, count: int) -> None:
    asks, done = answered
    last = len(asks) - 1
    wrong = replace(done, outputs=deepcopy(done.outputs))
    told = next(output for output in wrong.outputs[last] if output.prompt_scores)
    *others, last_one = told.prompt_scores
    told.prompt_scores = [*others, *[last_one] * (1 + count)]
    with pytest.raises(Wrong, match=f"{8 + count} logprobs of its prompt are told, not 8"):
        answers.judge(asks, wrong, last)


def test_two_requests_without_a_seed_draw_differently(answered: Answered) -> None:
    _, done = answered
    alike = replace(done, tokens=[*done.tokens[:1], *[[1, 2]] * 2])
    with pytest.raises(Wrong, match="drew the same 2 tokens"):
        answers._require_other_noise(alike)
