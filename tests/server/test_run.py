"""One HTTP request's sequences: the engine hears at once of each that ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.answers import Answer
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.engine.params import SamplingParams
from trueline.server.service import Run
from trueline.text.tokenizer import Tokenizer


class Told:
    """A stream that says what it is given, and writes down what is aborted."""

    def __init__(self, news: list[CoreOutput]) -> None:
        self.news, self.aborted = news, list[list[str] | None]()

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> CoreOutput:
        if not self.news:
            raise StopAsyncIteration
        return self.news.pop(0)

    def waiting(self) -> Iterator[CoreOutput]:
        return iter(())

    def abort(self, names: list[str] | None = None) -> None:
        self.aborted.append(names)


@pytest.fixture
def told(tiny: Any) -> tuple[Run, Told]:
    """Two sequences of which the first meets a stop string with its second token."""
    tokenizer = Tokenizer.load(tiny("deepseek_v3"))
    a, x = tokenizer.encode("ax", add_special_tokens=False)
    answer = Answer("q", None, [1], SamplingParams(n=2, stop=["x"], max_tokens=9), tokenizer)
    stream = Told(
        [
            CoreOutput(request_id=name, token_ids=[token], scores=[TokenScore(token, -1.0, 1)])
            for name, token in (("q/0", a), ("q/1", a), ("q/0", x), ("q/1", a), ("q/1", a))
        ]
    )
    metrics = SimpleNamespace(observe=lambda *_: None, ended=lambda *_: None)
    engine = SimpleNamespace(generate=lambda requests: stream)

    async def aside(size: int, work: Any, *given: Any) -> Any:
        return work(*given)

    service: Any = SimpleNamespace(
        metrics=metrics, engine=engine, check_room=lambda count: None, aside=aside
    )
    return Run(service, [answer], list(answer.core_requests([]))), stream


def test_one_of_several_that_a_stop_string_ends(told: tuple[Run, Told]) -> None:
    run, stream = told

    async def read() -> list[list[list[str] | None]]:
        return [list(stream.aborted) async for _ in run.outputs()]

    assert asyncio.run(read()) == [[], [], [["q/0"]], [["q/0"]], [["q/0"]]], (
        "with the token that ended it, once"
    )
    assert stream.aborted[-1] is None


def test_a_reader_that_leaves_between_two_pieces(told: tuple[Run, Told]) -> None:
    """It waits for nothing then, so nobody cancels it: it is closed."""
    run, stream = told

    async def read() -> None:
        outputs = run.outputs()
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(read())
    assert stream.aborted == [None]
