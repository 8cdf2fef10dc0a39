"""The server's lifespan: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.server.app import build_app
from trueline.server.config import ServerConfig
from trueline.server.connection import connection
from trueline.server.keys import read_keys
from trueline.server.listen import close, listen, tls_context, url
from trueline.server.logs import event, keep_stderr, start_logs
from trueline.server.metrics import Metrics
from trueline.server.notify import notify
from trueline.server.process.client import EngineClient, EngineFailed
from trueline.server.process.messages import Progress, Ready
from trueline.server.process.replicas import Replicas, replica_configs
from trueline.server.service import Service
from trueline.text.tokenizer import Tokenizer
from trueline.utils.gc_frozen import gc_frozen
from trueline.utils.hub import find_model, model_name

FLUSH_SECONDS = 5.0
"""For responses that are complete, and that slow clients still read."""
PROGRESS_SECONDS = 5.0
SECONDS_TO_NAME_A_RANK = 10.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(model: str, engine: EngineConfig, config: ServerConfig) -> int:
    """Serves until a signal, or until the engine is lost. Returns the exit code."""
    keep_stderr()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner, gc_frozen():
        return runner.run(_Lifespan(model, engine, config).run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: it does not run everywhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _Http(uvicorn.Server):
    """`_Lifespan` handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Lifespan:
    def __init__(self, model: str, engine: EngineConfig, config: ServerConfig) -> None:
        self.began = time.monotonic()
        self.config = config
        self.keys = read_keys(config.api_key, config.api_key_file)
        self.tls = tls_context(config)
        self.directory = find_model(model, check=partial(read_model, facts=engine.facts))
        named = config.tokenizer
        own = find_model(named, weights=False) if named else self.directory
        self.tokenizer = Tokenizer.load(own)
        self.models = config.served_model_name or (model_name(model),)
        if config.chat_template is not None:
            self.tokenizer.chat_templates = {"default": _read(config.chat_template)}
        self.options = engine
        self.logger = start_logs(config.log_format, config.log_level)
        self.signals = 0
        self.logged: dict[int, tuple[str, float]] = {}

    async def run(self) -> int:
        self.stopping = asyncio.Event()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._signal, number)
        clients = [
            EngineClient(
                self.directory,
                options,
                on_death=self.config.on_engine_death,
                silence=_silence(options),
                tokenizer=self.tokenizer.directory,
                on_progress=partial(self._progress, i),
            )
            for i, options in enumerate(replica_configs(self.options))
        ]
        self.engine = Replicas(clients, self._replica_lost)
        self.service = Service(
            self.engine,
            self.tokenizer,
            self.config,
            self.models,
            Metrics(self.config.metrics_prefix, self.models[0]),
        )
        self.service.metrics.watch(self.engine.clients)
        listening = listen(self.config)
        http = self._http()
        serving = asyncio.create_task(http.serve([listening]))
        try:
            return await self._serve(url(listening, self.tls is not None))
        finally:
            http.should_exit = True
            await serving
            close(listening, self.config)

    async def _serve(self, url: str) -> int:
        event(self.logger, "loading", model=str(self.directory), url=url)
        loading = asyncio.create_task(self.engine.start())
        stopping = asyncio.create_task(self.stopping.wait())
        died = asyncio.create_task(self.engine.died.wait())
        try:
            await asyncio.wait({loading, stopping, died}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                self._announce(await loading, url)
            await asyncio.wait({stopping, died}, return_when=asyncio.FIRST_COMPLETED)
            return await self._drain() if stopping.done() else self._lost()
        except EngineFailed as error:
            print(f"trueline: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            for task in (loading, stopping, died):
                task.cancel()

    async def _drain(self) -> int:
        self.service.drain()
        notify("STOPPING=1")
        running = self.engine.num_open
        event(self.logger, "draining", sequences=running, seconds=self.config.shutdown_timeout)
        await self.engine.stop(self.config.shutdown_timeout)
        event(self.logger, "stopped")
        return 0

    def _lost(self) -> int:
        """`Replicas` has failed all open streams."""
        event(self.logger, "engine lost", logging.ERROR, reason=self.engine.reason)
        return 1

    def _replica_lost(self, replica: int, reason: str) -> None:
        event(self.logger, "replica lost", logging.ERROR, replica=replica, reason=reason)

    def _http(self) -> _Http:
        app, tls = build_app(self.service, self.keys, self.logger), self.tls
        return _Http(
            uvicorn.Config(
                app,
                http=connection(self.config.read_timeout),
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
                server_header=False,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )

    def _signal(self, number: int) -> None:
        self.signals += 1
        if self.signals > 1:
            self.engine.kill()
            os._exit(128 + number)
        self.stopping.set()

    def _progress(self, replica: int, progress: Progress) -> None:
        """Logs every phase, and every PROGRESS_SECONDS within one: large models load for long."""
        now = time.monotonic()
        phase, then = self.logged.get(replica, ("starting", self.began))
        if progress.phase != phase or now - then >= PROGRESS_SECONDS:
            self.logged[replica] = progress.phase, now
            which = {"replica": replica} if len(self.engine.clients) > 1 else {}
            event(self.logger, "loading", phase=str(progress), **which)
            notify(f"STATUS=loading: {progress}")

    def _announce(self, ready: Ready, url: str) -> None:
        phases = ", ".join(f"{name} {s:.1f}" for name, s in ready.startup_seconds.items())
        keys = "asked for" if self.keys else "none: everybody who reaches it may use it"
        lines = [
            f"model        {ready.family}, served as {', '.join(self.models)}",
            *self._replica_lines(),
            f"chats        {self.service.answers.found}",
            *ready.plan_lines,
            f"ready in     {time.monotonic() - self.began:.1f} s ({phases})",
            f"API keys     {keys}",
            f"listening on {url}",
        ]
        if self.config.log_format == "json":
            event(self.logger, "ready", url=url, plan=lines)
        else:
            print("\n".join(lines), file=sys.stderr, flush=True)
        notify(f"READY=1\nSTATUS={', '.join(self.models)} on {url}")

    def _replica_lines(self) -> list[str]:
        count = len(self.engine.clients)
        return [f"replicas     {count}, each as follows"] if count > 1 else []


def _silence(options: EngineConfig) -> float | None:
    """Seconds after which the engine's process is taken to hang. Ranks that do are named by the
    process itself, so it has a little longer then."""
    several = SECONDS_TO_NAME_A_RANK if options.tensor_parallel_size > 1 else 0.0
    return options.engine_timeout + several if options.engine_timeout else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template {file}: {error}") from None
