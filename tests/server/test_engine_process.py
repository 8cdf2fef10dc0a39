"""The engine in its own process: the same answers as without one, and every way it can end."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from trueline import LLM, SamplingParams
from trueline.config import EngineConfig
from trueline.engine import core
from trueline.engine.executor import HasFileno
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreOutput, CoreRequest, TokenScore
from trueline.errors import RequestRejected, UsageError
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.server.process import engine_process
from trueline.server.process.client import SHUTTING_DOWN, EngineClient, EngineFailed
from trueline.server.process.engine_process import EngineLoop, serve
from trueline.server.process.messages import (
    Abort,
    Add,
    Failed,
    FromEngine,
    LoadModel,
    Progress,
    Rejected,
    Stats,
    StepOutputs,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)
from trueline.server.process.streams import EngineDead, Stream

T = TypeVar("T")
Tiny = Callable[..., Path]
# bits that do not depend on who else runs, so that answers can be compared as they are
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 400,
    "max_num_seqs": 16,
    "batch_invariant": True,
}
CONFIG = EngineConfig(**OPTIONS)
EOS = [257]
LONG = 400
PATIENCE = 20.0
"""Seconds, for what takes far less on a machine that is not busy."""


def ask(
    name: str, max_tokens: int = 8, prompt: list[int] | None = None, **params: Any
) -> CoreRequest:
    chosen = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    return CoreRequest(
        request_id=name, prompt_token_ids=prompt or [1, 2, 3], params=SamplingParams(**chosen)
    )


class Running:
    """A client and the loop it lives in, for tests that are not coroutines themselves."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = EngineClient(model, CONFIG, **options)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 3 * PATIENCE))

    def close(self) -> None:
        self.do(self.client.stop(0))
        self.loop.close()


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("deepseek_v3")


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    """One engine for all tests that leave it alive."""
    running = Running(model)
    running.do(running.client.start())
    yield running
    running.close()


@pytest.fixture
def own(model: Path) -> Iterator[Callable[..., Running]]:
    """Engines of a test's own, ended with it."""
    made: list[Running] = []

    def make(where: Path = model, **options: Any) -> Running:
        made.append(Running(where, **options))
        return made[-1]

    yield make
    for running in made:
        running.close()


async def read(stream: Stream) -> list[CoreOutput]:
    return [output async for output in stream]


async def tokens(stream: Stream) -> list[int]:
    return [token for output in await read(stream) for token in output.token_ids]


async def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


async def is_idle(client: EngineClient) -> None:
    """The engine has told every end, and with the last one that nobody holds anything."""
    await until(lambda: not client._streams, 5)
    assert (client.stats.num_running, client.stats.num_waiting) == (0, 0)
    assert client.stats.num_blocks_used == 0


# -- messages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 2**63 - 1, "min_p": 0.1, "seed": 2**62},
        {"seed": -(2**63), "max_tokens": None, "min_tokens": 4, "logprobs": -1},
        {"stop": ["a", "\U0001f600"], "bad_words": ["x"], "stop_token_ids": [5, 3, 5]},
        {"logit_bias": {"7": 1, 9: -2.5}, "allowed_token_ids": [9, 7], "prompt_logprobs": 0},
        {"repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 0.1},
        {"include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False},
    ],
)
def test_requests_cross_as_they_are(params: dict[str, Any]) -> None:
    wanted = SamplingParams(**params)
    request = CoreRequest(
        request_id="é", prompt_token_ids=[0, 2**31], params=wanted, eos_token_ids=EOS,
        bad_word_ids=[[1, 2], [3]], priority=-5, cache_salt="salt",
    )  # fmt: skip
    (found,) = decode_to_engine(encode(Add([request]))).requests  # type: ignore[union-attr]
    assert found == request
    for name in SamplingParams.__struct_fields__:
        assert type(getattr(found.params, name)) is type(getattr(wanted, name))


def test_options_cross_as_they_are() -> None:
    config = EngineConfig(**OPTIONS, ops={"mlp": "cpu"}, facts={"a": [1, {"b": 2.5}]}, seed=7)
    assert decode_to_engine(encode(LoadModel("here", config))) == LoadModel("here", config)


# -- answers -------------------------------------------------------------------------------

VARIED: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {"temperature": 0.0, "max_tokens": 30}),
    (list(range(40, 140)), {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2}),
    ([9], {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 20, "ignore_eos": True}),
    (list(range(60)), {"n": 2, "temperature": 0.8, "top_k": 5, "seed": 3, "logprobs": 1}),
    ([5, 6, 7], {"temperature": 1.5, "seed": 4, "min_tokens": 5, "max_tokens": 40}),
    ([8] * 50, {"temperature": 1.0, "seed": 5, "top_p": 0.7, "repetition_penalty": 1.3}),
    ([3, 1, 4], {"temperature": 1.0, "seed": 6, "max_tokens": 64,
                 "stop_token_ids": list(range(0, 311, 9))}),
    ([2, 7, 1, 8], {"temperature": 0.0, "logit_bias": {17: 100.0}, "max_tokens": 3}),
]  # fmt: skip


def plain(output: CoreOutput) -> dict[str, Any]:
    """Without the clock; NaN is what no logprobs look like."""
    found: dict[str, Any] = msgspec.to_builtins(output)
    del found["first_scheduled"]
    for score in [*found["scores"], *found["prompt_scores"]]:
        score["logprob"] = None if math.isnan(score["logprob"]) else score["logprob"]
    return found


def test_answers_are_those_of_an_engine_in_this_process(shared: Running, model: Path) -> None:
    count = 4 * len(VARIED)  # more than have a seat at once
    asked = [VARIED[i % len(VARIED)] for i in range(count)]
    prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
    params = [SamplingParams(**each) for _, each in asked]
    wanted = LLM(model, skip_tokenizer_init=True, **OPTIONS).generate(prompts, params)

    async def answer(i: int) -> RequestOutputState:
        prepared = PreparedParams(params[i], None)
        found = RequestOutputState(f"same-{i}", None, asked[i][0], prepared)
        async for output in shared.client.generate(list(prepared.core_requests(found, EOS))):
            found.update(output)
        return found

    async def all_of_them() -> list[RequestOutputState]:
        return await asyncio.gather(*(answer(i) for i in range(count)))

    stops = 0
    for found, known in zip(shared.do(all_of_them()), wanted, strict=True):
        output = found.output
        assert output.finished
        assert output.outputs == known.outputs
        assert output.prompt_logprobs == known.prompt_logprobs
        stops += any(one.stop_reason is not None for one in output.outputs)
    assert stops >= 4  # some ended by a stop token
    shared.do(is_idle(shared.client))


def test_a_slow_reader_gets_one_piece_with_everything(shared: Running) -> None:
    async def work() -> tuple[list[CoreOutput], list[CoreOutput]]:
        request = {"max_tokens": 50, "logprobs": 2, "prompt_logprobs": 1}
        quick = shared.client.generate([ask("quick", **request)])
        pieces = await read(quick)
        finished = shared.client.stats.num_finished
        slow = shared.client.generate([ask("slow", **request)])
        await until(lambda: shared.client.stats.num_finished > finished)
        return pieces, await read(slow)

    quick, slow = shared.do(work())
    assert len(quick) > 10
    (whole,) = slow
    joined = {"token_ids": [], "scores": [], "prompt_scores": []}
    for piece in quick:
        for name, values in joined.items():
            values += plain(piece)[name]
    assert len(whole.token_ids) == 50
    assert len(whole.prompt_scores) == 2
    assert whole.finish_reason == "length"
    assert {name: plain(whole)[name] for name in joined} == joined


def test_what_has_come_is_read_without_waiting() -> None:
    async def work() -> None:
        stream = Stream(["a", "b", "c"], lambda names: None)
        for name, token in (("a", 1), ("b", 2), ("a", 3)):
            stream.push(CoreOutput(request_id=name, token_ids=[token]))
        stream.push(CoreOutput(request_id="b", finish_reason="length"))
        first, *more = await anext(stream), *stream.waiting()
        assert (first.request_id, first.token_ids) == ("a", [1, 3])
        assert [(each.request_id, each.finish_reason) for each in more] == [("b", "length")]
        assert list(stream.waiting()) == []
        for name in ("a", "c"):
            stream.push(CoreOutput(request_id=name, finish_reason="stop"))
        assert len(list(stream.waiting())) == 2
        assert [each async for each in stream] == []  # all have told their end

    asyncio.run(work())


def test_outputs_are_merged_with_all_they_say() -> None:
    """Of an end that comes while what came before it is not read yet, nothing is lost."""
    kept = {"request_id": "a", "num_cached_tokens": 7, "first_scheduled": 1.5}
    said = {
        "token_ids": [1], "scores": [TokenScore(1, -1.0, 1)],
        "prompt_scores": [TokenScore(2, -2.0, 1)], "finish_reason": "stop", "stop_reason": 3,
        "complete": True, "error": "why", "client_error": True,
    }  # fmt: skip
    assert {*kept, *said} == set(CoreOutput.__struct_fields__)

    async def work() -> None:
        stream = Stream(["a"], lambda names: None)
        stream.push(CoreOutput(**kept))
        stream.push(CoreOutput(request_id="a", **said))
        assert plain(await anext(stream)) == plain(CoreOutput(**kept, **said))

    asyncio.run(work())


def test_times(shared: Running) -> None:
    async def work() -> None:
        start = time.monotonic()
        first, *rest = await read(shared.client.generate([ask("times")]))
        assert first.first_scheduled is not None
        assert start < first.first_scheduled < time.monotonic()
        assert {output.first_scheduled for output in rest} == {first.first_scheduled}

    shared.do(work())


def test_stats_add_up(shared: Running) -> None:
    async def work() -> tuple[Stats, Stats]:
        await is_idle(shared.client)
        before = shared.client.stats
        ids = list(range(100, 148))
        for name in ("one", "two"):
            await tokens(shared.client.generate([ask(name, 5, ids)]))
        await until(lambda: shared.client.stats.num_finished == before.num_finished + 2)
        return before, shared.client.stats

    before, after = shared.do(work())
    assert after.num_added - before.num_added == 2
    assert after.num_generated_tokens - before.num_generated_tokens == 10
    assert after.num_prompt_tokens - before.num_prompt_tokens == 96
    assert after.num_query_tokens - before.num_query_tokens == 96
    assert after.num_hit_tokens - before.num_hit_tokens == 32
    assert after.num_steps - before.num_steps == 10
    assert sum(after.step_counts) - sum(before.step_counts) == 10
    assert 0 < after.last_step_seconds < after.step_seconds
    assert (after.num_blocks, after.num_blocks_used) == (400, 0)
    assert after.num_blocks_cached >= 3
    assert after.num_corrupted == 0


# -- requests that end early ---------------------------------------------------------------


def test_refusals(shared: Running) -> None:
    async def work() -> None:
        client = shared.client
        with pytest.raises(RequestRejected, match="'long': the prompt has 600 tokens, max_model"):
            await read(client.generate([ask("long", prompt=[1] * 600)]))
        # all or none: the first could have run
        with pytest.raises(RequestRejected, match="'b/1'"):
            await read(client.generate([ask("b/0"), ask("b/1", prompt=[1] * 600)]))
        assert len(await tokens(client.generate([ask("b/0")]))) == 8
        running = client.generate([ask("taken", LONG)])
        with pytest.raises(RequestRejected, match="'taken': this request_id is in use"):
            await read(client.generate([ask("taken")]))
        running.abort()
        with pytest.raises(RequestRejected, match="'twice': this request_id is in use"):
            await read(client.generate([ask("twice"), ask("twice")]))
        await is_idle(client)

    shared.do(work())


@pytest.mark.parametrize("how", ["abort", "aclose", "cancel", "unread"])
def test_leaving_frees_everything(shared: Running, how: str) -> None:
    async def leave(number: int) -> None:
        stream = shared.client.generate([ask(f"{how}-{number}/{i}", LONG) for i in range(3)])
        reader = asyncio.ensure_future(read(stream) if how == "cancel" else anext(stream))
        if how != "unread":
            await asyncio.sleep(0.005 * number)
        if how == "cancel":
            reader.cancel()
        elif how == "aclose":
            await stream.aclose()
        else:
            stream.abort()
            stream.abort()
        with suppress(asyncio.CancelledError, StopAsyncIteration):
            await reader
        if how != "cancel":
            assert await read(stream) == []

    async def work() -> None:
        aborted = shared.client.stats.num_aborted
        await asyncio.gather(*(leave(i) for i in range(8)))
        await is_idle(shared.client)
        assert shared.client.stats.num_aborted == aborted + 24

    shared.do(work())


def test_one_sequence_of_several_can_be_ended(shared: Running) -> None:
    async def work() -> None:
        stream = shared.client.generate([ask(f"some/{i}", 40 + i) for i in range(3)])
        first = await anext(stream)
        stream.abort(["some/1", "strange"])
        rest = [first, *await read(stream)]
        counts = {name: sum(len(o.token_ids) for o in rest if o.request_id == name)
                  for name in ("some/0", "some/1", "some/2")}  # fmt: skip
        assert counts == {"some/0": 40, "some/1": 0, "some/2": 42}
        await is_idle(shared.client)

    shared.do(work())


def test_an_id_comes_back_after_its_abort_without_old_news(shared: Running) -> None:
    async def work() -> None:
        wanted = await tokens(shared.client.generate([ask("wanted", 20, [50, 60])]))
        for _ in range(5):
            stream = shared.client.generate([ask("again", LONG)])
            await anext(stream)
            stream.abort()
            await until(lambda: "again" not in shared.client._streams)
            found = await tokens(shared.client.generate([ask("again", 20, [50, 60])]))
            assert found == wanted

    shared.do(work())


def test_signals_are_for_the_parent(shared: Running) -> None:
    async def work() -> None:
        assert shared.client.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(shared.client.pid, number)
        assert len(await tokens(shared.client.generate([ask("signals", 30)]))) == 30

    shared.do(work())


# -- the loop inside the process -----------------------------------------------------------


class Script:
    """A channel that brings what it is given, and remembers what it was told."""

    def __init__(self, *messages: ToEngine) -> None:
        self.inbox, self.sent = deque(messages), list[FromEngine]()

    def receive(self, wait: bool) -> ToEngine | None:
        assert self.inbox or not wait, "it would wait for ever"
        return self.inbox.popleft() if self.inbox else None

    def wake_on(self, alarm: HasFileno) -> None:
        raise AssertionError("one rank rings no alarm")

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def serving(model: Path, *messages: ToEngine, **options: Any) -> tuple[EngineLoop, Script]:
    script = Script(*messages)
    core = load_engine(model, EngineConfig(**{**OPTIONS, **options})).core
    return EngineLoop(core, script), script


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_frees_blocks_and_slots_within_two_steps(
    tiny: Tiny, family: str, overlap: bool
) -> None:
    engine, script = serving(tiny(family), Add([ask("a", LONG), ask("b", LONG)]), overlap=overlap)
    for _ in range(5):
        assert engine.handle_messages()
        engine.step()
    held = engine.stats.snapshot()
    assert held.num_blocks_used == 2
    assert held.num_slots_used == (2 if family == "bailing_moe_v2_5" else 0)
    script.inbox.append(Abort(["a", "unknown"]))
    for _ in range(2):
        assert engine.handle_messages()
        engine.step()
    left = engine.stats.snapshot()
    assert (left.num_running, left.num_blocks_used, left.num_aborted) == (1, 1, 1)
    assert left.num_slots_used == held.num_slots_used // 2
    ends = [(output.request_id, output.finish_reason) for message in script.sent
            for output in message.outputs if output.finish_reason]  # type: ignore[union-attr]  # fmt: skip
    assert ends == [("a", "abort")]


def test_a_step_is_one_message_and_counts_come_now_and_then(model: Path) -> None:
    requests = [ask(f"r{i}", 12) for i in range(10)]
    engine, script = serving(model, Add(requests))
    while engine.core.has_unfinished() or script.inbox:
        assert engine.handle_messages()
        engine.step()
    assert len(script.sent) == 12
    messages = [message for message in script.sent if isinstance(message, StepOutputs)]
    assert [len(message.outputs) for message in messages] == [10] * 12
    with_stats = [message for message in messages if message.stats]
    assert with_stats[-1] is messages[-1]
    assert len(with_stats) <= 2 + engine.stats.step_seconds / 0.05
    assert messages[-1].stats.num_blocks_used == 0  # type: ignore[union-attr]
    # a refusal alone is no step, but it is counted
    script.inbox.append(Add([ask("fine"), ask("long", prompt=[1] * 600)]))
    assert engine.handle_messages()
    engine.core.abort("nobody")
    while engine.core.has_unfinished():
        engine.step()
    engine.step()
    rejected, told = script.sent[12:]
    assert isinstance(rejected, Rejected)
    assert rejected.request_ids == ["fine", "long"]
    assert isinstance(told, StepOutputs)
    assert (told.outputs, told.stats.num_rejected) == ([], 1)  # type: ignore[union-attr]
    script.inbox.append(Stop())
    assert not engine.handle_messages()


def test_last_words_wait_for_the_reader(tmp_path: Path) -> None:
    script = Script(LoadModel(str(tmp_path), CONFIG), Abort(["a"]), Stop())
    assert serve(script) == 2
    assert [type(message) for message in script.sent] == [Progress, Failed]
    assert not script.inbox


def test_grammars_know_the_vocabulary_before_requests_come(model: Path) -> None:
    """To make it holds up all streams: 0.1 s for 129,280 tokens without merges."""
    core = engine_process._load(LoadModel(str(model), CONFIG), Script()).core
    assert "vocabulary" in vars(core.grammars)
    core.close()


def test_a_tokenizer_that_is_none_is_told_to_requests_with_a_grammar(
    model: Path, tmp_path: Path
) -> None:
    core = engine_process._load(LoadModel(str(model), CONFIG, str(tmp_path)), Script()).core
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        core.grammars.prepare().result()
    core.close()


def test_nan_is_counted(model: Path) -> None:
    engine, script = serving(model, Add([ask("bad", prompt=[77, 5]), ask("good")]))
    engine.core.executor.runner.decoder.embedding[77] = math.nan
    while engine.core.has_unfinished() or script.inbox:
        assert engine.handle_messages()
        engine.step()
    stats = script.sent[-1].stats  # type: ignore[union-attr]
    assert stats is not None
    assert (stats.num_corrupted, stats.num_finished) == (1, 2)


def test_queued_requests_are_scheduled_when_there_is_a_seat(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, script = serving(model, Add([ask("first", 6), ask("second", 2)]), max_num_seqs=1)
    ticks = count()
    monkeypatch.setattr(core, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    while engine.core.has_unfinished() or script.inbox:
        assert engine.handle_messages()
        engine.step()
    outputs = [output for message in script.sent for output in message.outputs]  # type: ignore[union-attr]
    times = {output.request_id: output.first_scheduled or 0.0 for output in outputs}
    assert times == {"first": 0, "second": 6}  # a tick a step


# -- the process ends ----------------------------------------------------------------------


def test_a_killed_engine_is_heard_of_at_once(own: Callable[..., Running]) -> None:
    running = own()

    async def work() -> None:
        client = running.client
        await client.start()
        streams = [client.generate([ask(f"k{i}/{j}", LONG) for j in range(2)]) for i in range(5)]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams]
        unread = client.generate([ask("unread", LONG)])
        await until(lambda: client.stats.num_generated_tokens > 20)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert str(result) == "the engine process was killed by SIGKILL"
        await asyncio.wait_for(client.died.wait(), PATIENCE)
        assert (client.state, client.reason, client.pid) == ("dead", str(result), None)
        assert len((await anext(unread)).token_ids) > 0  # what came before
        with pytest.raises(EngineDead):
            await anext(unread)
        with pytest.raises(EngineDead, match="the engine is dead: the engine process was killed"):
            await read(client.generate([ask("late")]))
        await client.stop(1)

    running.do(work())


READY = """
import json, sys, time
sys.path[:], address = json.loads(sys.stdin.readline())
from trueline.server.process import messages
from trueline.server.process.engine_process import Socket
channel = Socket(address)
assert isinstance(channel.receive(wait=True), messages.LoadModel)
channel.send(messages.Ready(
    plan_lines=[], startup_seconds={}, family="none", vocab_size=1, eos_token_ids=[],
    max_model_len=1, max_num_seqs=1, max_logprobs=0, num_blocks=1, block_size=1,
    num_state_slots=None,
    memory_bytes={},
))
"""
SAYS_WHY = (
    READY
    + """
assert isinstance(channel.receive(wait=True), messages.Add)
channel.send(messages.Failed("a rank is gone", 1))
time.sleep(1000)
"""
)


@pytest.mark.parametrize("on_death", ["exit", "restart"])
def test_why_an_engine_ends_is_heard_before_its_process_has_ended(
    own: Callable[..., Running], on_death: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that takes too long for that is killed; another one is started only then."""
    monkeypatch.setattr("trueline.server.process.process_handle.BOOT", SAYS_WHY)
    running = own(on_death=on_death)

    async def work() -> None:
        client = running.client
        await client.start()
        first = client.pid
        with pytest.raises(EngineDead, match=r"^a rank is gone$"):
            await read(client.generate([ask("lost")]))
        assert (client.state, client.reason, client.pid) == ("dead", "a rank is gone", first)
        assert not client.died.is_set()
        with pytest.raises(EngineDead, match="the engine is dead: a rank is gone"):
            await read(client.generate([ask("late")]))
        assert client._watch is not None
        client._watch._run()  # its time has come
        if on_death == "exit":
            await asyncio.wait_for(client.died.wait(), PATIENCE)
            assert (client.state, client.reason) == ("dead", "a rank is gone")
        else:
            await until(lambda: client.state == "ready")
            assert client.pid not in (None, first)

    running.do(work())


def test_restart(own: Callable[..., Running], model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    running = own(copy, on_death="restart")

    async def work() -> None:
        client = running.client
        await client.start()
        wanted = await tokens(client.generate([ask("before", 30)]))
        lost = client.generate([ask("lost", LONG)])
        client.kill()
        with pytest.raises(EngineDead):
            await read(lost)
        assert client.state == "loading"
        with pytest.raises(EngineDead, match="the engine is loading"):
            await read(client.generate([ask("meanwhile")]))
        await until(lambda: client.state == "ready")
        assert await tokens(client.generate([ask("after", 30)])) == wanted
        assert (client.num_restarts, client.died.is_set()) == (1, False)
        assert client.stats.num_added <= 1  # counts begin again
        # one that cannot start again is dead for good
        (copy / "config.json").unlink()
        client.kill()
        await asyncio.wait_for(client.died.wait(), PATIENCE)
        assert client.state == "dead"
        assert "config.json" in (client.reason or "")

    running.do(work())


NO_MODEL = (
    READY
    + """
while not isinstance(channel.receive(wait=True), messages.Stop):
    pass
channel.close()
"""
)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes that are ready at once and have no engine: to be killed, not asked."""
    monkeypatch.setattr("trueline.server.process.process_handle.BOOT", NO_MODEL)


def test_a_process_that_never_connects(
    own: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot take the first message: nobody waits for that, and its end is told."""
    boot = "import sys; sys.stdin.readline(); sys.exit(5)"
    monkeypatch.setattr("trueline.server.process.process_handle.BOOT", boot)
    running = own()

    async def work() -> None:
        with pytest.raises(EngineFailed, match="exit code 5"):
            await asyncio.wait_for(running.client.start(), PATIENCE)

    running.do(work())


@pytest.mark.usefixtures("no_model")
def test_too_many_deaths(own: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueline.server.process.client.MOST_RESTARTS", 1)
    running = own(on_death="restart")

    async def work() -> None:
        client = running.client
        await client.start()
        client.kill()
        await until(lambda: client.num_restarts == 1 and client.state == "ready")
        client.kill()
        await asyncio.wait_for(client.died.wait(), PATIENCE)
        assert (client.state, client.num_restarts) == ("dead", 1)
        assert (client.reason or "").endswith("by SIGKILL; dead 2 times within 600 s")

    running.do(work())


@pytest.mark.usefixtures("no_model")
def test_deaths_of_long_ago_do_not_count(
    own: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.server.process.client.MOST_RESTARTS", 1)
    monkeypatch.setattr("trueline.server.process.client.WITHIN", 0.0)
    running = own(on_death="restart")

    async def work() -> None:
        client = running.client
        await client.start()
        client.kill()
        await until(lambda: client.state == "ready" and client.num_restarts == 1)
        client.kill()
        await until(lambda: client.num_restarts == 2)

    running.do(work())


def test_a_hung_engine_is_killed(own: Callable[..., Running]) -> None:
    """It lives, and does nothing."""
    running = own(silence=PATIENCE)

    async def work() -> None:
        client = running.client
        await client.start()
        stream = client.generate([ask("hung", LONG)])
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)  # what was on its way
        client._heard -= PATIENCE
        with pytest.raises(EngineDead, match="said nothing for 20 s; it was killed"):
            await read(stream)
        await asyncio.wait_for(client.died.wait(), PATIENCE)
        assert client.reason == "the engine had work and said nothing for 20 s; it was killed"

    running.do(work())


def test_an_idle_engine_may_be_silent(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared.client, "silence", PATIENCE)

    async def work() -> None:
        client = shared.client
        client._heard -= 2 * PATIENCE
        stream = client.generate([ask("after a while", 5)])
        client._check_hung()
        assert await tokens(stream)
        assert client.state == "ready"

    shared.do(work())


def test_a_request_that_cannot_be_admitted_ends_alone(shared: Running) -> None:
    async def work() -> None:
        client = shared.client
        stream = client.generate([ask("running", LONG)])
        await anext(stream)
        # nothing that passes the front end's checks: no token id is negative
        (told,) = await read(client.generate([ask("broken", prompt=[-1] * 16)]))
        assert told.finish_reason == "error"
        assert "request 'broken': it could not be admitted" in (told.error or "")
        await anext(stream)
        assert client.state == "ready"
        stream.abort()
        await is_idle(client)

    shared.do(work())


# -- stopping ------------------------------------------------------------------------------


def test_stop_lets_requests_finish(own: Callable[..., Running]) -> None:
    running = own()

    async def work() -> None:
        client = running.client
        await client.start()
        readers = [asyncio.ensure_future(tokens(client.generate([ask(f"s{i}", 100)])))
                   for i in range(4)]  # fmt: skip
        await until(lambda: client.stats.num_running == 4)
        stopping = asyncio.ensure_future(client.stop(PATIENCE))
        await asyncio.sleep(0)
        assert (client.state, client.reason) == ("stopped", SHUTTING_DOWN)
        with pytest.raises(EngineDead, match="the engine is stopped: the server is shutting"):
            await read(client.generate([ask("late")]))
        await client.stop(0)  # a second one ends nothing sooner
        assert [len(found) for found in await asyncio.gather(*readers)] == [100] * 4
        await stopping
        assert client.pid is None
        assert not client.died.is_set()

    running.do(work())


def test_stop_ends_what_takes_too_long(own: Callable[..., Running]) -> None:
    running = own()

    async def work() -> None:
        client = running.client
        await client.start()
        streams = [client.generate([ask(f"t{i}", LONG)]) for i in range(12)]
        readers = [asyncio.ensure_future(read(stream)) for stream in streams[:-1]]
        await until(lambda: client.stats.num_running == 12)
        assert client.pid is not None
        process = client._process.process  # type: ignore[union-attr]
        await client.stop(0.05)
        assert process.returncode == 0  # by itself
        for found in [*await asyncio.gather(*readers), await read(streams[-1])]:
            last = found[-1]
            assert (last.finish_reason, last.error) == ("abort", SHUTTING_DOWN)
            assert 0 < sum(len(output.token_ids) for output in found) < LONG
            assert sum(output.finish_reason is not None for output in found) == 1

    running.do(work())


# -- a start that fails --------------------------------------------------------------------


def test_a_bad_model_is_named(own: Callable[..., Running], tmp_path: Path) -> None:
    running = own(tmp_path / "nowhere")
    with pytest.raises(EngineFailed, match="nowhere: no such file") as caught:
        running.do(running.client.start())
    assert caught.value.exit_code == 2
    assert (running.client.state, running.client.reason) == ("dead", str(caught.value))
    assert running.client.died.is_set()


def test_a_bad_config_is_named(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("{", '{"index_topk_freq": 3, ', 1))
    script = Script(LoadModel(str(copy), CONFIG), Stop())
    assert serve(script) == 2
    assert isinstance(script.sent[-1], Failed)
    assert "index_topk_freq" in script.sent[-1].error


def test_killed_or_stopped_while_loading(own: Callable[..., Running]) -> None:
    seen: list[Progress] = []
    running = own(on_progress=seen.append)

    async def work() -> None:
        starting = asyncio.ensure_future(running.client.start())
        await until(lambda: bool(seen))
        running.client.kill()
        with pytest.raises(EngineFailed, match="killed by SIGKILL while loading") as caught:
            await starting
        assert caught.value.exit_code == 1
        # the same client can be started again, and stopped before it is there
        starting = asyncio.ensure_future(running.client.start())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(running.client.stop(PATIENCE), 2 * PATIENCE)
        with pytest.raises(EngineFailed):
            await starting
        assert (running.client.state, running.client.pid) == ("stopped", None)

    running.do(work())
    assert seen[0].phase == "starting"


# -- nothing is left -----------------------------------------------------------------------

PARENT = """
import asyncio, os, signal, sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from trueline.config import EngineConfig
from trueline.server.process import engine_process
from trueline.server.process.client import EngineClient

async def main():
    client = EngineClient(Path(sys.argv[1]), EngineConfig(max_model_len=64))
    starting = asyncio.ensure_future(client.start())
    await asyncio.sleep(0)
    print(client.pid, flush=True)
    if sys.argv[2] == "loading":  # nothing of the child has been heard
        os.kill(os.getpid(), signal.SIGKILL)
    await starting
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """For temporary files of this test alone. The name of a socket may not be long."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield Path(directory)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_no_orphan_when_the_parent_is_killed(model: Path, when: str, temporary: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(model), when],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    end = time.monotonic() + PATIENCE
    while is_running(pid):
        assert time.monotonic() < end, "the engine outlives its parent"
        time.sleep(0.02)
    assert not list(temporary.iterdir())


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_nothing_is_left_behind(
    model: Path, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def once(where: Path) -> None:
        async def work() -> None:
            client = EngineClient(where, CONFIG)
            with suppress(EngineFailed):
                await client.start()
                await tokens(client.generate([ask("a", 3)]))
            await client.stop(1)

        asyncio.run(work())

    once(tmp_path)  # zmq and asyncio keep some for good
    before = resources()
    once(model)
    assert not list(temporary.iterdir())
    end = time.monotonic() + 2  # the thread that waited for the process is just ending
    while resources() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert resources() == before


def test_scores_without_logprobs_cross_too() -> None:
    score = msgspec.msgpack.decode(encode(TokenScore(3, math.nan, 0)), type=TokenScore)
    assert (score.token_id, score.rank, math.isnan(score.logprob)) == (3, 0, True)
