"""EngineClient: starts the engine process and talks to it, in the server's event loop. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from trueline.config import EngineConfig
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.errors import RequestRejected, TruelineError
from trueline.server.process.messages import (
    Abort,
    Add,
    Failed,
    LoadModel,
    Progress,
    Ready,
    Rejected,
    Stats,
    StepOutputs,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)
from trueline.server.process.process_handle import ProcessHandle, how_it_ended
from trueline.server.process.streams import EngineDead, Stream

State = Literal["loading", "ready", "dead", "stopped"]
SHUTTING_DOWN = "the server is shutting down"
SECONDS_TO_END = 5.0
"""For a process that was sent Stop; then it is killed."""
MOST_RESTARTS, WITHIN = 5, 600.0
"""More deaths than that in so many seconds, and it is not started again."""
CHECKS = 4
"""Checks for a hung engine within `silence` seconds."""


class EngineFailed(TruelineError):
    """The engine process could not start. `exit_code` is its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineClient:
    """Lives in one event loop. `on_death` says what a lost engine means: "exit" leaves it to the
    owner, who waits for `died`; "restart" starts another one, and `died` comes only if that
    cannot be started, or has died too often. Either way what was running is lost. One that has
    work and says nothing for `silence` seconds is taken for hung, and killed: a step never takes
    that long."""

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        *,
        on_death: Literal["exit", "restart"] = "exit",
        silence: float | None = None,
        tokenizer: Path | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.model, self.config, self.on_death = model, config, on_death
        self.silence, self.tokenizer = silence, tokenizer
        self.state: State = "loading"
        self.reason: str | None = "not started"
        self.ready: Ready
        self.stats = Stats()
        self.died = asyncio.Event()
        self.num_restarts = self.num_canary_hits = 0
        self._on_progress = on_progress
        self._process: ProcessHandle | None = None
        self._failed: Failed | None = None
        self._started: asyncio.Future[Ready] | None = None
        self._streams: dict[str, Stream] = {}  # until the engine has sent their finish_reason
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._deaths: list[float] = []

    # -- start and end -----------------------------------------------------------------

    async def start(self) -> Ready:
        """Returns when the model is loaded; EngineFailed says in the engine's own words why not."""
        self._launch()
        assert self._started is not None
        return await self._started

    def _launch(self) -> None:
        self.state, self.reason = "loading", "starting"
        self._failed, self.stats = None, Stats()
        self._started = asyncio.get_running_loop().create_future()
        self._process = ProcessHandle(self._received, self._ended)
        tokenizer = None if self.tokenizer is None else str(self.tokenizer)
        self._send(LoadModel(str(self.model), self.config, tokenizer))

    @property
    def pid(self) -> int | None:
        """Of the engine process, where there is one."""
        return (
            None
            if self._process is None or self._process.exit.done()
            else self._process.process.pid
        )

    @property
    def num_open(self) -> int:
        """Sequences in the engine, waiting ones included."""
        return len(self._streams)

    async def stop(self, timeout: float) -> None:
        """Let what runs finish for up to `timeout` seconds, end the rest, end the process."""
        was, self.state, self.reason = self.state, "stopped", SHUTTING_DOWN
        process = self._process
        if process is None or process.exit.done():
            return
        if was == "stopped":  # somebody else has
            await asyncio.wait([process.exit])
            return
        if was == "loading":
            process.kill()
        else:
            await self._drain(timeout)
            self._send(Stop())
        done, _ = await asyncio.wait([process.exit], timeout=SECONDS_TO_END)
        if not done:
            process.kill()
            await asyncio.wait([process.exit])

    def kill(self) -> None:
        """At once. Open streams fail with EngineDead."""
        if self._process is not None:
            self._process.kill()

    async def _drain(self, timeout: float) -> None:
        try:
            await asyncio.wait_for(self._none_left.wait(), timeout)
        except TimeoutError:
            for name, stream in self._streams.items():
                stream.push(CoreOutput(request_id=name, finish_reason="abort", error=SHUTTING_DOWN))
            self.abort(list(self._streams))

    # -- requests ----------------------------------------------------------------------

    def generate(self, requests: Sequence[CoreRequest]) -> Stream:
        stream = Stream([request.request_id for request in requests], self.abort)
        self.add(requests, stream)
        return stream

    def add(self, requests: Sequence[CoreRequest], stream: Stream) -> None:
        """All of them or none. A refusal is raised by the stream."""
        names = [request.request_id for request in requests]
        used = next((name for name in names if name in self._streams), None)
        if self.state != "ready":
            stream.fail(EngineDead(f"the engine is {self.state}: {self.reason}"))
        elif used is not None:
            stream.fail(
                RequestRejected(f"request '{used}': this request_id is in use; choose another")
            )
        else:
            if not self._streams:  # it had nothing to say
                self._heard = asyncio.get_running_loop().time()
            self._streams.update(dict.fromkeys(names, stream))
            self._none_left.clear()
            self._send(Add(list(requests)))

    def abort(self, names: Sequence[str]) -> None:
        """Those of them that are in this engine."""
        known = [name for name in names if name in self._streams]
        if known:
            self._send(Abort(known))

    def _send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(encode(message))

    # -- messages from the engine ------------------------------------------------------

    def _received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        message = decode_from_engine(data)
        if isinstance(message, StepOutputs):
            self._dispatch(message)
        elif isinstance(message, Rejected):
            for stream in self._forget(message.request_ids):
                stream.fail(RequestRejected(message.message))
        elif isinstance(message, Progress):
            self._report(message)
        elif isinstance(message, Ready):
            self._loaded(message)
        else:
            self._failed = message
            self.num_canary_hits += message.canary_hit
            self._send(Stop())  # it waits for that, so that it is heard before it is gone
            if self.state == "ready":
                self._lost(message.error)

    def _dispatch(self, message: StepOutputs) -> None:
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.push(output)
                if output.finish_reason:
                    self._forget([output.request_id])
        if message.stats is not None:
            self.stats = message.stats

    def _forget(self, names: Sequence[str]) -> set[Stream]:
        gone = {self._streams.pop(name) for name in names if name in self._streams}
        if not self._streams:
            self._none_left.set()
        return gone

    def _report(self, progress: Progress) -> None:
        if self.state == "loading":
            self.reason = str(progress)
        if self._on_progress is not None:
            self._on_progress(progress)

    def _loaded(self, ready: Ready) -> None:
        if self.state != "loading":
            return  # stopped meanwhile
        self.ready, self.state, self.reason = ready, "ready", None
        self._check_hung()
        if self._started is not None and not self._started.done():
            self._started.set_result(ready)

    def _check_hung(self) -> None:
        """Kills an engine that has work and is silent for too long; checks again in a while."""
        if self.silence is None or self.state != "ready":
            return
        loop = asyncio.get_running_loop()
        if self._streams and loop.time() - self._heard > self.silence:
            said = f"the engine had work and said nothing for {self.silence:g} s; it was killed"
            self._failed = Failed(said, 1)
            self.kill()
        else:
            self._watch = loop.call_later(self.silence / CHECKS, self._check_hung)

    def _lost(self, error: str) -> None:
        """It has said why it ends. Taking its memory down lasts: nobody waits for that."""
        self._fail_streams(error)
        self.state, self.reason = "dead", error
        assert self._process is not None
        self._end_watch()
        self._watch = asyncio.get_running_loop().call_later(SECONDS_TO_END, self._process.kill)

    def _fail_streams(self, error: str) -> None:
        for stream in self._forget(list(self._streams)):
            stream.fail(EngineDead(error))

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _ended(self, code: int) -> None:
        self._end_watch()
        words = self._failed
        error = words.error if words else how_it_ended(code)
        self._fail_streams(error)
        assert self._started is not None
        had_started = self._started.done()
        if not had_started:
            if words is None:
                error += f" while loading ({self.reason})"
            self._started.set_exception(EngineFailed(error, words.exit_code if words else 1))
        if self.state == "stopped":
            return
        self.state, self.reason = "dead", error
        if had_started and self.on_death == "restart" and self._may_restart():
            self.num_restarts += 1
            self._launch()
            # nobody waits for it: what it fails with is in `reason`
            self._started.add_done_callback(lambda started: started.exception())
        else:
            self.died.set()

    def _may_restart(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._deaths = [*(then for then in self._deaths if now - then < WITHIN), now]
        if len(self._deaths) <= MOST_RESTARTS:
            return True
        self.reason = f"{self.reason}; dead {len(self._deaths)} times within {WITHIN:g} s"
        return False
