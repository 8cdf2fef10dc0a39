"""What clients say of times and tokens, by a clock that the test winds: exact, on any machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trueline.client import record as records
from trueline.client import response
from trueline.client.figures import summary
from trueline.client.load import Load, Shape
from trueline.client.measure import LoadRun
from trueline.client.record import Record
from trueline.client.response import StreamedResponse
from trueline.client.wire import read_chunk


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (records, response):
        monkeypatch.setattr(module, "time", made)
    return made


def frame(tokens: int = 1, usage: int | None = None, ended: bool = False) -> dict[str, Any]:
    choice = {"text": "x" * tokens, "token_ids": [7] * tokens}
    if ended:
        choice["finish_reason"] = "length"
    told = {"usage": {"prompt_tokens": 5, "completion_tokens": usage}} if usage else {}
    return {"choices": [choice] if tokens else [], **told}


def recorded(clock: Clock, start: float, steps: list[tuple[float, dict[str, Any]]]) -> Record:
    made = Record(start=start)
    made.head(200, "OK", {b"content-type": b"text/event-stream"})
    for at, body in steps:
        clock.now = at
        made.data(b"data: " + json.dumps(body).encode() + b"\n\n")
    made.close()
    return made


def test_a_summary(clock: Clock) -> None:
    """Two answers of 4 tokens and one that failed: every figure by hand."""
    first = recorded(clock, 10.0, [(10.5, frame()), (10.75, frame()), (11.75, frame(2, 4, True))])
    second = recorded(clock, 11.0, [(12.0, frame()), (12.5, frame(3, 4, True))])
    failed = Record(start=10.0, end=14.0, error="HTTP 500", message="no", text_chunks=3)
    run = LoadRun(Load(2), [first, failed, second], seconds=5.0, cpu_seconds=1.0)
    found = summary(run, Shape(5, 4, 100, seed=0))
    assert (found["requests"], found["succeeded"]) == (3, 2)
    assert found["errors"] == {"HTTP 500": {"count": 1, "example": "no"}}
    assert found["requests_per_s"] == 2 / 5
    assert (found["output_tokens"], found["prompt_tokens"]) == (8, 10)
    assert (found["output_tokens_per_s"], found["total_tokens_per_s"]) == (8 / 5, 18 / 5)
    assert found["mean_in_flight"] == (1.75 + 1.5 + 4.0) / 5
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["max"]) == (750.0, 1000.0)
    # of 6 gaps three are within one piece
    assert first.gaps == [0.25, 1.0, 0.0]
    assert second.gaps == [0.5, 0.0, 0.0]
    assert found["itl_ms"]["mean"] == pytest.approx(1750 / 6)
    assert found["tpot_ms"]["mean"] == pytest.approx((1250 / 3 + 500 / 3) / 2)
    assert (found["e2e_ms"]["mean"], found["e2e_ms"]["max"]) == (1625.0, 1750.0)
    assert (found["short_answers"], found["client"]["cpu"]) == (0, 0.2)
    assert (found["tokens_counted_by"], found["gaps_between"]) == (["usage"], "tokens")


def test_an_answer_s_speed(clock: Clock) -> None:
    """After the first token: n - 1 of them in the time from the first to the last."""
    made = StreamedResponse(start=99.0)
    for at in (100.0, 100.5, 102.0):
        clock.now = at
        made.update(read_chunk(json.dumps(frame()).encode()))
    assert (made.num_tokens, made.tokens_per_s, made.first) == (3, 1.0, 100.0)
    assert made.account().startswith("first token after 1.000 s, then 1.0 tokens/s, about 3 tokens")
    made.update(read_chunk(json.dumps(frame(0, 5)).encode()))
    assert (made.num_tokens, made.tokens_per_s) == (5, 2.0)
    alone = StreamedResponse(start=99.0)
    alone.update(read_chunk(json.dumps(frame(4)).encode()))
    assert (alone.num_tokens, alone.tokens_per_s) == (4, None)
