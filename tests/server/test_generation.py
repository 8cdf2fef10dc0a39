"""One HTTP request's sequences: the engine hears at once of each that ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trueline.engine.messages import CoreOutput, TokenScore
from trueline.engine.params import SamplingParams
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.server.service import Generation
from trueline.text.tokenizer import Tokenizer


class FakeStream:
    """A stream that says what it is given, and writes down what is aborted."""

    def __init__(self, outputs: list[CoreOutput]) -> None:
        self.outputs, self.aborted = outputs, list[list[str] | None]()
        self.engines: dict[str, int] = {}

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> CoreOutput:
        if not self.outputs:
            raise StopAsyncIteration
        return self.outputs.pop(0)

    def waiting(self) -> Iterator[CoreOutput]:
        return iter(())

    def abort(self, names: list[str] | None = None) -> None:
        self.aborted.append(names)


@pytest.fixture
def generated(tiny: Any) -> tuple[Generation, FakeStream]:
    """Two sequences of which the first meets a stop string with its second token."""
    tokenizer = Tokenizer.load(tiny("deepseek_v3"))
    a, x = tokenizer.encode("ax", add_special_tokens=False)
    params = PreparedParams(SamplingParams(n=2, stop=["x"], max_tokens=9), tokenizer)
    state = RequestOutputState("q", None, [1], params)
    stream = FakeStream(
        [
            CoreOutput(request_id=name, token_ids=[token], scores=[TokenScore(token, -1.0, 1)])
            for name, token in (("q/0", a), ("q/1", a), ("q/0", x), ("q/1", a), ("q/1", a))
        ]
    )
    metrics = SimpleNamespace(observe=lambda *_: None, ended=lambda *_: None)
    engine = SimpleNamespace(generate=lambda requests: stream)

    async def offload(size: int, work: Any, *given: Any) -> Any:
        return work(*given)

    service: Any = SimpleNamespace(
        metrics=metrics, engine=engine, check_room=lambda count: None, offload=offload
    )
    return Generation(service, [state], list(params.core_requests(state, []))), stream


def test_one_of_several_that_a_stop_string_ends(generated: tuple[Generation, FakeStream]) -> None:
    generation, stream = generated

    async def read() -> list[list[list[str] | None]]:
        return [list(stream.aborted) async for _ in generation.outputs()]

    assert asyncio.run(read()) == [[], [], [["q/0"]], [["q/0"]], [["q/0"]]], (
        "with the token that ended it, once"
    )
    assert stream.aborted[-1] is None


def test_a_reader_that_leaves_between_two_pieces(generated: tuple[Generation, FakeStream]) -> None:
    """It waits for nothing then, so nobody cancels it: it is closed."""
    generation, stream = generated

    async def read() -> None:
        outputs = generation.outputs()
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(read())
    assert stream.aborted == [None]
