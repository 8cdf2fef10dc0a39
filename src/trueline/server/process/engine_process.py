"""The engine process: loads a model, then handles messages and runs steps until it is sent Stop or
its parent is gone.

It ignores SIGINT and SIGTERM: a terminal sends them to parent and child alike, and what they mean
is the parent's to decide. Nothing is ever written to its standard input but the first line.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import zmq

from trueline.engine.messages import CoreOutput
from trueline.errors import CANARY_HIT, EngineBroken, RequestRejected, TruelineError, described
from trueline.models import read_model
from trueline.server.logs import keep_stderr
from trueline.server.process.messages import (
    Abort,
    Add,
    Failed,
    FromEngine,
    LoadModel,
    Progress,
    Ready,
    Rejected,
    StepOutputs,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)
from trueline.server.process.stats import StatsRecorder
from trueline.utils.gc_frozen import gc_frozen
from trueline.utils.parent import when_the_parent_ends

if TYPE_CHECKING:
    from trueline.engine.core import EngineCore
    from trueline.engine.executor import HasFileno
    from trueline.engine.loading import Loaded

SECONDS_BETWEEN_PROGRESS = 0.1
TRACEBACK_LINES = 12


class Channel(Protocol):
    def receive(self, wait: bool) -> ToEngine | None:
        """The next message; None if none is waiting and we are not to wait, or if the alarm that
        we were told to wake on rings."""

    def wake_on(self, alarm: HasFileno) -> None: ...

    def send(self, message: FromEngine) -> None: ...


class Socket:
    """A channel to another process. Sending never waits: what the other side has not read yet is
    kept by a thread of zmq's."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # no limit: the parent reads all the time and merges what it has
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake_on(self, alarm: HasFileno) -> None:
        self._poller.register(alarm, zmq.POLLIN)

    def receive(self, wait: bool) -> ToEngine | None:
        if wait:
            self._poller.poll()
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_to_engine(data)

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        """Returns when all that was sent is out."""
        self._socket.close()
        self._context.term()


def main(address: str) -> int:
    keep_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_the_parent(Path(address.removeprefix("ipc://")))
    channel = Socket(address)
    try:
        return serve(channel)
    finally:
        channel.close()


def _end_with_the_parent(socket: Path) -> None:
    def end() -> None:
        with suppress(OSError):  # the parent has done this, unless it went very early
            socket.unlink()
            socket.parent.rmdir()
        os._exit(1)

    when_the_parent_ends(end)


def serve(channel: Channel) -> int:
    """Handles messages from LoadModel to Stop. Returns the exit code."""
    try:
        channel.send(Progress("starting"))
        load = channel.receive(wait=True)
        assert isinstance(load, LoadModel)
        start = time.monotonic()
        loaded = _load(load, channel)
        seconds = time.monotonic() - start - sum(loaded.seconds.values())
        channel.send(_ready(loaded, load, {"imports": seconds, **loaded.seconds}))
        if (alarm := loaded.core.executor.alarm) is not None:
            channel.wake_on(alarm)
        channel.wake_on(loaded.core.grammars.bell)
        EngineLoop(loaded.core, channel).run()
        loaded.core.close()
    except Exception as error:
        failed = _failed(error)
        channel.send(failed)
        while not isinstance(channel.receive(wait=True), Stop):
            pass  # the parent sends it once it has read why we end
        return failed.exit_code
    return 0


def _failed(error: Exception) -> Failed:
    if isinstance(error, TruelineError):
        return Failed(str(error), error.exit_code, CANARY_HIT in str(error))
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return Failed("\n".join(lines[-TRACEBACK_LINES:]), 1)


# -- loading -------------------------------------------------------------------------------


def _load(load: LoadModel, channel: Channel) -> Loaded:
    model = Path(load.model)
    spec = read_model(model, load.config.facts)  # what is wrong is told before torch is imported
    # here, because it imports torch: seconds in which signals and a parent's end count already
    from trueline.engine.grammars import grammars_in
    from trueline.engine.loading import load_engine
    from trueline.native import tell_builds

    tell_builds(lambda text: channel.send(Progress(text)))
    # while weights are read: the first request with a grammar would hold up those beside it
    grammars = grammars_in(Path(load.tokenizer or model), spec.vocab.total)
    vocabulary = grammars.prepare()
    loaded = load_engine(model, load.config, _reporter(channel))
    vocabulary.exception()  # what is wrong with it is told to requests with a grammar
    loaded.core.grammars = grammars
    return loaded


def _reporter(channel: Channel) -> Callable[[int, int], None]:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_PROGRESS or done == total:
            last = now
            channel.send(Progress("weights", done, total))

    return report


def _ready(loaded: Loaded, load: LoadModel, seconds: dict[str, float]) -> Ready:
    spec, plan, core = loaded.spec, loaded.plan, loaded.core
    return Ready(
        plan_lines=list(loaded.lines()),
        startup_seconds=seconds,
        family=spec.family,
        vocab_size=spec.vocab.total,
        eos_token_ids=list(spec.eos_token_ids),
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_logprobs=load.config.max_logprobs,
        num_blocks=core.pool.num_usable,
        block_size=core.pool.block_size,
        num_state_slots=core.slots.num_usable if core.slots else None,
        memory_bytes=plan.memory_bytes,
    )


# -- the loop ------------------------------------------------------------------------------


class EngineLoop:
    def __init__(self, core: EngineCore, channel: Channel) -> None:
        self.core, self.channel = core, channel
        self.stats = StatsRecorder(core)

    def run(self) -> None:
        """Until Stop."""
        with gc_frozen():
            while self.handle_messages():
                self.step()

    def handle_messages(self) -> bool:
        """Handles all messages that have come; waits for one only where the core has no work.
        False: Stop has come."""
        idle = not self.core.has_work()
        message = self.channel.receive(wait=idle)
        if idle and message is None:
            self.core.check()
        while message is not None:
            if isinstance(message, Stop):
                return False
            self.handle(message)
            message = self.channel.receive(wait=False)
        return True

    def handle(self, message: ToEngine) -> None:
        self.stats.touched()
        if isinstance(message, Add):
            self._add(message)
        elif isinstance(message, Abort):
            for name in message.request_ids:
                self.core.abort(name)
        else:
            raise TypeError(f"the engine is loaded, and was sent {type(message).__name__}")

    def _add(self, message: Add) -> None:
        names = [request.request_id for request in message.requests]
        taken: list[str] = []
        try:
            for request in message.requests:
                self.core.add(request)
                taken.append(request.request_id)
        except EngineBroken:
            raise
        except Exception as error:
            for name in taken:
                self.core.abort(name, report=False)
            self.channel.send(self._refused(names, error))
        else:
            self.stats.added(message.requests)

    def _refused(self, names: list[str], error: Exception) -> FromEngine:
        if isinstance(error, RequestRejected):
            return Rejected(names, str(error))
        why = f"it could not be admitted: {described(error)}"
        return StepOutputs(
            [
                CoreOutput(request_id=name, finish_reason="error", error=f"request '{name}': {why}")
                for name in names
            ]
        )

    def step(self) -> None:
        """One step of the core, and one message with its outputs and stats."""
        outputs = []
        if self.core.has_work():
            start = time.monotonic()
            outputs = self.core.step()
            self.stats.stepped(time.monotonic() - start, outputs)
        stats = self.stats.due()
        if outputs or stats:
            self.channel.send(StepOutputs(outputs, stats))
