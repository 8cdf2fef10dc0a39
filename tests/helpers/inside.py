"""The whole server in this process: routes, protocol and engine, without sockets and without a
second process. Engine steps are made one by one, so that a test can count them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueline.config import EngineConfig
from trueline.engine.executor import HasFileno
from trueline.engine.grammars import grammars_in
from trueline.engine.loading import load_engine
from trueline.server.app import build_app
from trueline.server.config import ServerConfig
from trueline.server.keys import Keys
from trueline.server.logs import start_logs
from trueline.server.metrics import Metrics
from trueline.server.process.client import EngineClient
from trueline.server.process.engine_process import EngineLoop, _ready
from trueline.server.process.messages import (
    FromEngine,
    LoadModel,
    Stats,
    ToEngine,
    decode_to_engine,
    encode,
)
from trueline.server.process.replicas import Replicas
from trueline.server.service import Service
from trueline.text.tokenizer import Tokenizer

MOST_TURNS = 200_000
"""Of the event loop, for one answer."""


class LocalEngine(EngineClient):
    """The client of an engine process, with the engine beside it instead."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        super().__init__(model, config)
        loaded = load_engine(model, config)
        self.core = loaded.core
        self.core.grammars = grammars_in(model, loaded.spec.vocab.total)
        self.serving = EngineLoop(loaded.core, self)
        self.ready = _ready(loaded, LoadModel(str(model), config), {})
        self.state, self.reason = "ready", None
        self.steps = 0

    def _send(self, message: ToEngine) -> None:
        self.serving.handle(decode_to_engine(encode(message)))

    def send(self, message: FromEngine) -> None:
        self._received(encode(message))

    def receive(self, wait: bool) -> ToEngine | None:
        return None

    def wake_on(self, alarm: HasFileno) -> None:
        raise AssertionError("one rank rings no alarm")

    def step(self) -> None:
        if self.core.has_unfinished():
            self.steps += 1
            self.serving.step()

    def snapshot(self) -> Stats:
        return self.serving.stats.snapshot()


@dataclass
class Heard:
    """What a client has got so far."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Inside:
    def __init__(
        self, model: Path, *, keys: tuple[str, ...] = (), log_format: str = "text", **options: Any
    ) -> None:
        names = ServerConfig.__dataclass_fields__
        config = ServerConfig(**{name: options.pop(name) for name in [*options] if name in names})
        self.engine = LocalEngine(model, EngineConfig(**options))
        self.tokenizer = Tokenizer.load(model)
        metrics = Metrics("trueline", "tiny")
        self.service = Service(Replicas([self.engine]), self.tokenizer, config, ("tiny",), metrics)
        metrics.watch([self.engine])
        self.log = io.StringIO()
        logger = start_logs(log_format, "debug")
        logger.handlers[0].setStream(self.log)  # type: ignore[attr-defined]
        self.app = build_app(self.service, Keys(keys), logging.getLogger(logger.name))

    def ask(self, path: str, asked: Any = None, **more: Any) -> Heard:
        """A body is posted as JSON, or as it is where it is bytes."""
        body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        method = more.pop("method", "GET" if asked is None else "POST")
        return asyncio.run(self._ask(method, path, b"" if asked is None else body, **more))

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        leaves_after: int | None = None,
    ) -> Heard:
        """`leaves_after` so many messages the client is gone."""
        heard, gone = Heard(), asyncio.Event()
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if coming:
                return coming.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if not gone.is_set():
                heard.messages.append(message)

        given = [(name.lower().encode(), value.encode("latin-1"))
                 for name, value in (headers or {}).items()]  # fmt: skip
        scope = {"type": "http", "method": method, "path": path, "headers": given,
                 "query_string": b"", "raw_path": path.encode(), "root_path": "",
                 "scheme": "http", "server": ("here", 80), "http_version": "1.1"}  # fmt: skip
        answering = asyncio.create_task(self.app(scope, receive, send))
        for turn in range(MOST_TURNS):
            await asyncio.sleep(0 if turn < 1000 else 0.001)
            if leaves_after is not None and len(heard.messages) >= leaves_after:
                gone.set()
            if answering.done():
                break
            self.engine.step()
        await answering
        return heard

    def steps_until_idle(self, most: int = 100) -> int:
        """How many steps the engine makes for nobody."""

        async def drain() -> int:
            before = self.engine.steps
            while self.engine.core.has_unfinished() and self.engine.steps < before + most:
                self.engine.step()
            return self.engine.steps - before

        return asyncio.run(drain())
