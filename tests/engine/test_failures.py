"""An exception anywhere in a step: who hears of it, what is free afterwards, what goes on.

The stages are not listed by hand: every function of ours that a step calls is one, found by
watching a run, so a new one is covered from its first day."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, reduce
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import trueline
from plug_ins import plug_in
from servers import serving
from trueline import LLM, SamplingParams
from trueline.config import EngineConfig
from trueline.engine import failures
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest
from trueline.engine.scheduler import Scheduler
from trueline.errors import EngineBroken
from trueline.llm import LLMEngine
from trueline.outputs import RequestOutput
from trueline.server.process.engine_process import EngineLoop, serve
from trueline.server.process.messages import (
    Add,
    Failed,
    FromEngine,
    LoadModel,
    StepOutputs,
    Stop,
    ToEngine,
)
from trueline.text.detokenize import Detokenizer

Tiny = Callable[..., Path]
Stage = tuple[str, str]
"""File and name of a function."""
SOURCE = Path(trueline.__file__).parent
# bits that depend on no company: what comes after a failure can be compared as it is
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "num_gpu_blocks_override": 40,
    "block_size": 4,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 9,
    "batch_invariant": True,
}
# Family, its layers, whether a step is ahead, and where not a single function is left out.
CASES = [
    ("deepseek_v3", {"num_hidden_layers": 2}, False, ("engine", "cache", "output_processor")),
    ("bailing_moe_v2_5", {"num_hidden_layers": 2, "layer_group_size": 2}, True,
     ("engine/core", "engine/runner", "engine/results", "engine/states", "cache/s")),
]  # fmt: skip
MOST_STEPS = 200
# What keeps account of requests, blocks and slots. Where it breaks off, nothing is sure any more.
BOOKS = ("engine/core.py", "engine/scheduler.py", "engine/states.py", "engine/request.py",
         "engine/drafts.py", "engine/live_request.py", "engine/grammars.py", "cache/",
         "engine/failures.py", "device.py")  # fmt: skip
# They hand on what is there already.
TRIVIAL = {
    *("LLMEngine.step", "RequestOutputState.to_stop", "RequestOutputState.fail"),
    *("RequestOutput.finished", "CompletionOutput.finished"),
}


class Injected(RuntimeError):
    pass


@cache
def stage_of(file: str, name: str) -> Stage | None:
    """If it is one of ours."""
    if not file.startswith(str(SOURCE)) or name in TRIVIAL or name.endswith(">"):
        return None
    return str(Path(file).relative_to(SOURCE)), name


class Watch:
    """Sees the calls of our functions, and raises in one of them."""

    def __init__(self) -> None:
        self.calls: Counter[Stage] = Counter()
        self.target: tuple[Stage, int] | None = None
        self.error: BaseException = Injected("injected")
        self.reached = False

    def aim(self, core: EngineCore, stage: Stage | None = None, call: int = 1) -> None:
        """In the runner's thread too: one that starts from now on, for what has raised is deaf."""
        self.calls.clear()
        self.target, self.reached = (stage, call) if stage else None, False
        self._renew(core, self)

    def rest(self, core: EngineCore) -> None:
        self.reached = True
        self._renew(core, None)

    def _renew(self, core: EngineCore, trace: Any) -> None:
        core.executor.worker.shutdown()
        core.executor.worker = ThreadPoolExecutor(1)
        threading.settrace(trace)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.reached or event != "call":
            return
        stage = stage_of(frame.f_code.co_filename, frame.f_code.co_qualname)
        if stage is None:
            return
        self.calls[stage] += 1
        if self.target == (stage, self.calls[stage]):
            self.reached = True
            raise self.error

    @contextmanager
    def on(self) -> Iterator[None]:
        sys.settrace(None if self.reached else self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            sys.settrace(None)


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Logs are not what is looked at here."""
    found = Watch()
    logging.disable(logging.CRITICAL)
    yield found
    logging.disable(logging.NOTSET)
    threading.settrace(None)  # type: ignore[arg-type]


# A chunked prompt whose beginning comes again, draws that must know what was drawn, logprobs, an
# arrival in the midst, and one that waits for a seat.
PROMPT = [(7 * i * i + 3) % 250 for i in range(22)]
ASKS: list[tuple[int, list[int], dict[str, Any]]] = [
    (0, PROMPT, {"temperature": 0.0, "logprobs": 2, "max_tokens": 4}),
    (0, [5, 6, 7], {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3, "max_tokens": 6}),
    (2, PROMPT[:9], {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 2}),
    (3, [*PROMPT[:17], 1], {"temperature": 0.8, "seed": 4, "logprobs": 0, "max_tokens": 2}),
]


def requests() -> Iterator[tuple[int, str, dict[str, Any], SamplingParams]]:
    for i, (step, ids, params) in enumerate(ASKS):
        chosen = SamplingParams(ignore_eos=True, **params)
        yield step, f"r{i}", {"prompt_token_ids": ids}, chosen


def told(output: RequestOutput) -> tuple[Any, ...]:
    """All but what depends on who came before."""
    copy = output.outputs[0]
    return copy.token_ids, copy.logprobs, output.prompt_logprobs, copy.finish_reason, copy.text


class Drive:
    """The requests through an engine, watched; what each got, and what was raised."""

    def __init__(self, engine: LLMEngine, watch: Watch) -> None:
        self.done: dict[str, RequestOutput] = {}
        self.raised: list[BaseException] = []
        waiting = deque(requests())
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= step:
                _, name, ids, params = waiting.popleft()
                try:
                    engine.add_request(name, ids, params)
                except EngineBroken as error:
                    self.raised.append(error)
            try:
                with watch.on():
                    outputs = engine.step()
            except (Injected, EngineBroken) as error:
                self.raised.append(error)
                outputs = []
            self.done |= {o.request_id: o for o in outputs if o.finished}
            step += 1
            assert step < MOST_STEPS, "it spins"


def cold(engine: LLMEngine) -> LLMEngine:
    """As if it had served nobody."""
    engine.core.pool.reset_prefix_cache()
    return engine


def check_free(core: EngineCore) -> None:
    for pool in (core.pool, core.slots):
        if pool is not None:
            pool.check()
            assert pool.num_free == pool.num_usable
    assert not core.requests
    assert set(core.executor.runner.sampling_states) <= set(core.ended), (
        "nobody will tell the runner"
    )


def check_stage(engine: LLMEngine, watch: Watch, right: dict[str, Any]) -> bool:
    """One run with an error in it, and one after it. Whether the engine went on."""
    drive = Drive(cold(engine), watch)
    assert watch.reached, "it was not called again"
    core, words = engine.core, str(watch.error)
    if core.broken:
        assert words in core.broken
        assert drive.raised
        assert all(words in str(error) for error in drive.raised)
        with pytest.raises(EngineBroken, match=words):
            engine.add_request("more", {"prompt_token_ids": [1]}, SamplingParams())
        with pytest.raises(EngineBroken, match=words):
            engine.step()
        assert not engine.has_unfinished_requests()
        return False
    heard = {name for name, out in drive.done.items() if words in (out.outputs[0].error or "")}
    assert heard or drive.raised, "nobody heard of it"
    assert set(drive.done) == set(right)
    for name, output in drive.done.items():
        reason = output.outputs[0].finish_reason
        assert (reason == "error") == (name in heard)
        if name not in heard:
            assert told(output) == right[name], f"{name} was not in the step, and is another"
    check_free(core)
    watch.rest(core)
    again = Drive(engine, watch)  # where it would find what was written
    assert not again.raised
    assert {name: told(output) for name, output in again.done.items()} == right
    check_free(core)
    return True


@pytest.mark.parametrize("share", [30, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "keys", "overlap", "whole"), CASES)
def test_an_exception_in_any_function_of_a_step(
    family: str,
    keys: dict[str, Any],
    overlap: bool,
    whole: tuple[str, ...],
    share: int,
    tiny: Tiny,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`share`: of the other functions one in so many."""
    monkeypatch.setattr(failures, "MOST_IN_A_ROW", 10**9)
    options = OPTIONS | {"overlap": overlap, "poison": overlap}

    def fresh() -> LLMEngine:
        return LLMEngine(tiny(family, keys=keys), **options)

    engine = fresh()
    first = Drive(engine, watch)
    assert not first.raised
    right = {name: told(output) for name, output in first.done.items()}
    assert len(right) == len(ASKS)
    watch.aim(engine.core)
    Drive(cold(engine), watch)  # without what is done once only
    stages = dict(watch.calls)
    found = {file.partition("/")[0] for file, _ in stages}
    assert found >= {"engine", "cache", "layers", "ops", "text"}, "the watch is blind"
    wrong, went_on = {}, set()
    for number, (stage, calls) in enumerate(sorted(stages.items())):
        if number % share and not stage[0].startswith(whole):
            continue
        try:
            watch.aim(engine.core, stage, 1 + number * 7 % calls)
            if check_stage(engine, watch, right):
                went_on.add(stage)
            else:
                assert stage[0].startswith(BOOKS), "no reason to give up"
                assert not stage[0].startswith("cache/kinds/"), "a step's inputs are its own"
                engine = fresh()
        except AssertionError as error:
            wrong[stage] = str(error).splitlines()[0]
            engine = fresh()
    assert not wrong, "\n".join(map(str, wrong.items()))
    assert ("engine/runner.py", "Runner.launch") in went_on


# -- by hand: what a run of all stages does not show ---------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SMALL: list[dict[str, Any]] = [{"prompt_token_ids": PROMPT[i : i + 7]} for i in range(5)]
Fail = Callable[..., None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """fail(owner, name, error, n): raised in the n-th call, and in `times` - 1 after it."""

    def make(owner: Any, name: str, error: BaseException, n: int = 1, times: int = 1) -> None:
        plain, calls = getattr(owner, name), iter(range(1, 10**6))

        def called(*given: Any, **named: Any) -> Any:
            if n <= next(calls) < n + times:
                raise error
            return plain(*given, **named)

        monkeypatch.setattr(owner, name, called)

    return make


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


ERRORS = [torch.OutOfMemoryError("no 3 GiB"), MemoryError(), KeyError("a"), SystemExit("plug-in")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("overlap", [False, True])
def test_generate_gives_each_prompt_its_answer_or_the_error(
    error: BaseException, overlap: bool, tiny: Tiny, fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    """Three seats: two of the five wait, and hear nothing of it. The log has the traceback."""
    llm = LLM(tiny("bailing_moe_v2_5"), **OPTIONS | {"overlap": overlap})
    core = llm.llm_engine.core
    right = tokens(llm.generate(SMALL, GREEDY))
    core.pool.reset_prefix_cache()
    fail(core.executor.runner.decoder, "hidden", error, 5)
    if isinstance(error, SystemExit) and not overlap:  # it is the caller's thread
        with pytest.raises(SystemExit):
            llm.generate(SMALL, GREEDY)
    else:
        ends = [output.outputs[0] for output in llm.generate(SMALL, GREEDY)]
        failed = [end for end in ends if end.finish_reason == "error"]
        assert 1 <= len(failed) <= 3
        for end in failed:
            assert type(error).__name__ in (end.error or "")
            assert str(error) in (end.error or "")
        for end, known in zip(ends, right, strict=True):
            assert end in failed or end.token_ids == known
    (record,) = caplog.records
    assert "a step failed" in record.getMessage()
    assert record.exc_info
    assert record.exc_info[1] is error
    check_free(core)
    assert tokens(llm.generate(SMALL, GREEDY)) == right


@pytest.mark.parametrize(
    "where", ["executor.runner.decoder.hidden", "executor.runner.sampling.sample", "_message"]
)
def test_ctrl_c_leaves_an_engine_that_serves(
    where: str, tiny: Tiny, fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    right = tokens(llm.generate(SMALL, GREEDY))
    *path, name = where.split(".")
    owner = reduce(getattr, path, llm.llm_engine.core)
    fail(owner, name, KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SMALL, GREEDY)
    assert not caplog.records, "it is no failed step, and a user who pressed it knows"
    check_free(llm.llm_engine.core)
    assert tokens(llm.generate(SMALL, GREEDY)) == right


def test_ctrl_c_while_we_wait_for_a_step(tiny: Tiny, fail: Fail) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS | {"overlap": True})
    right = tokens(llm.generate(SMALL, GREEDY))
    fail(Future, "exception", KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SMALL, GREEDY)
    check_free(llm.llm_engine.core)
    assert tokens(llm.generate(SMALL, GREEDY)) == right


def test_ctrl_c_in_the_books_breaks_the_engine(tiny: Tiny, fail: Fail) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    fail(llm.llm_engine.core.scheduler, "_settle", KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SMALL, GREEDY)
    with pytest.raises(EngineBroken, match="cannot go on: KeyboardInterrupt"):
        llm.generate(SMALL, GREEDY)


def no_kernel(*given: Any) -> None:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("overlap", [False, True])
def test_too_many_failures_in_a_row_are_no_accident(
    overlap: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that succeeds begins the count anew; and whoever asks afterwards hears why not."""
    llm = LLM(tiny("deepseek_v3"), **OPTIONS | {"max_num_seqs": 1, "overlap": overlap})
    core, many = llm.llm_engine.core, failures.MOST_IN_A_ROW
    prompts = [{"prompt_token_ids": [i]} for i in range(1, many + 2)]
    for _ in range(2):  # the second time shows that the first was forgotten
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core.executor.runner.decoder, "hidden", no_kernel)
            ends = [each.outputs[0].finish_reason for each in llm.generate(prompts[1:], GREEDY)]
            assert ends == ["error"] * many
        assert llm.generate(prompts[0], GREEDY)[0].outputs[0].finish_reason == "length"
    monkeypatch.setattr(core.executor.runner.decoder, "hidden", no_kernel)
    said = f"{many + 1} steps in a row have failed, the last with RuntimeError: no kernel"
    for _ in range(2):
        with pytest.raises(EngineBroken, match=said):
            llm.generate(prompts, GREEDY)
    core.close()


def test_a_gpu_that_is_lost_breaks_the_engine(
    tiny: Tiny, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in a kernel CUDA repeats that error for ever."""
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    fail(
        llm.llm_engine.core.executor.runner.decoder, "hidden", RuntimeError("an illegal access"), 4
    )
    fail(failures, "recover", RuntimeError("an illegal access"))
    with pytest.raises(EngineBroken, match="the GPU is lost: RuntimeError: an illegal access"):
        llm.generate(SMALL, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_scheduler_that_schedules_nothing_is_no_reason_to_spin(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    monkeypatch.setattr(llm.llm_engine.core.scheduler, "schedule", lambda: None)
    with pytest.raises(EngineBroken, match="nothing is scheduled"):
        llm.generate(SMALL, GREEDY)


def test_an_error_on_admission_is_as_if_nobody_had_come(tiny: Tiny, fail: Fail) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    right = tokens(llm.generate(SMALL, GREEDY))
    fail(llm.llm_engine.core.executor.runner, "admit", KeyError("story"), 2)
    hot = SamplingParams(n=3, seed=1, max_tokens=2)
    with pytest.raises(KeyError, match="story"):
        llm.generate(SMALL, hot)
    check_free(llm.llm_engine.core)
    assert tokens(llm.generate(SMALL, GREEDY)) == right


def test_a_text_that_cannot_be_made_ends_its_own_request_only(tiny: Tiny, fail: Fail) -> None:
    llm = LLM(tiny("deepseek_v3"), **OPTIONS)
    right = tokens(llm.generate(SMALL, GREEDY))
    fail(Detokenizer, "push", ValueError("no such token"), 4)
    outputs = llm.generate(SMALL, GREEDY)
    errors = [output.outputs[0].error for output in outputs]
    (said,) = [error for error in errors if error]
    assert "could not be made: ValueError: no such token" in said
    for known, found, error in zip(right, tokens(outputs), errors, strict=True):
        assert error or found == known
    check_free(llm.llm_engine.core)


# -- served --------------------------------------------------------------------------------


class Script:
    """A channel that brings what it is given, step by step, and remembers what it was told."""

    def __init__(self, *messages: ToEngine) -> None:
        self.inbox, self.sent = deque(messages), list[FromEngine]()

    def wake_on(self, ready: object) -> None:
        pass

    def receive(self, wait: bool) -> ToEngine | None:
        return self.inbox.popleft() if wait else None

    def send(self, message: FromEngine) -> None:
        assert len(self.sent) < MOST_STEPS, "it spins"
        self.sent.append(message)

    def told(self) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and error of each request."""
        found: dict[str, tuple[list[int], str | None]] = {}
        for news in (message for message in self.sent if isinstance(message, StepOutputs)):
            for output in news.outputs:
                known, _ = found.get(output.request_id, ([], None))
                found[output.request_id] = ([*known, *output.token_ids], output.error)
        return found


def asked(first: int = 0) -> Add:
    return Add(
        [
            CoreRequest(
                request_id=f"s{first + i}", prompt_token_ids=p["prompt_token_ids"], params=GREEDY
            )
            for i, p in enumerate(SMALL)
        ]
    )


@pytest.mark.parametrize(
    "stage", ["_message", "executor.runner.launch", "executor.runner.sampling.sample", "_read"]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_client_hears_of_a_failed_step_and_others_go_on(
    stage: str, overlap: bool, tiny: Tiny, fail: Fail
) -> None:
    """The second half comes when the first has been told: from an engine that has failed."""
    config = EngineConfig(**OPTIONS | {"overlap": overlap})
    core = load_engine(tiny("bailing_moe_v2_5"), config).core
    *path, name = stage.split(".")
    fail(reduce(getattr, path, core), name, RuntimeError("it broke"), 4)
    script = Script(asked(), asked(5), Stop())
    EngineLoop(core, script).run()
    heard = script.told()
    assert set(heard) == {f"s{i}" for i in range(10)}
    failed = {name for name, (_, error) in heard.items() if error}
    assert 1 <= len(failed) <= 3
    for i in range(5):
        assert heard[f"s{i + 5}"][1] is None
        error = heard[f"s{i}"][1]
        assert error is None or "RuntimeError: it broke" in error
        assert error or heard[f"s{i}"] == heard[f"s{i + 5}"]
    check_free(core)
    last = [message.stats for message in script.sent if isinstance(message, StepOutputs)][-1]
    assert last is not None
    assert (last.num_running, last.num_waiting, last.num_blocks_used, last.num_slots_used) == (
        0, 0, 0, 0
    )  # fmt: skip
    assert last.num_corrupted == len(failed)


def test_an_error_on_admission_is_told_to_the_client(tiny: Tiny, fail: Fail) -> None:
    core = load_engine(tiny("deepseek_v3"), EngineConfig(**OPTIONS)).core
    fail(core.executor.runner, "admit", KeyError("story"), 3)
    script = Script(asked(), asked(5), Stop())
    EngineLoop(core, script).run()
    heard = script.told()
    assert {heard[f"s{i}"][1] for i in range(5)} == {
        f"request 's{i}': it could not be admitted: KeyError: 'story'" for i in range(5)
    }
    assert all(len(heard[f"s{i}"][0]) == 5 for i in range(5, 10))
    check_free(core)


def test_a_served_engine_that_cannot_go_on_dies_loudly(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(self: Scheduler, row: Any, accepted: int) -> None:
        raise RuntimeError("the books are wrong")

    monkeypatch.setattr(Scheduler, "_settle", settle)
    load = LoadModel(str(tiny("deepseek_v3")), EngineConfig(**OPTIONS))
    script = Script(load, asked(), Stop())
    assert serve(script) == 1
    (failed,) = (message for message in script.sent if isinstance(message, Failed))
    assert failed.error == "the engine cannot go on: RuntimeError: the books are wrong"


PLUG_IN = """
import torch
from trueline.ops.sampling.cpu import *
from trueline.ops.sampling import cpu
api_version = 5
score = cpu.score
def sample(logits, rows):
    if rows.bias is not None:
        raise torch.OutOfMemoryError("the plug-in wants 3 GiB")
    return cpu.sample(logits, rows)
"""


def test_over_http_with_a_plug_in_that_fails(tiny: Tiny, tmp_path: Path) -> None:
    paths = plug_in(tmp_path, "greedy_plug", "sampling.greedy_plug", PLUG_IN)
    flags = ("--op", "sampling=greedy_plug")
    ask = {"prompt": "true to the", "temperature": 0, "max_tokens": 4}
    with serving(tiny("deepseek_v3"), *flags, PYTHONPATH=paths) as served:
        right = served.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        for stream in (False, True):
            bad = served.post(
                "/v1/completions", json=ask | {"logit_bias": {"7": 1}, "stream": stream}
            )
            assert bad.status_code == 500
            assert "OutOfMemoryError: the plug-in wants 3 GiB" in bad.json()["error"]["message"]
            assert bad.json()["error"]["code"] == "engine_error"
            after = served.post("/v1/completions", json=ask)
            assert after.json()["choices"][0]["text"] == right
        assert served.metric("trueline:kv_cache_usage_perc") == 0
        assert served.metric("trueline:corrupted_requests_total") == 2
