"""What `trueline eval` evaluates: a model that is loaded here, or one that a server has."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trueline.cli.generate import OfflineEngine
from trueline.cli.remote import ADDRESS, ConnectionOptions
from trueline.errors import UsageError
from trueline.utils.hub import find_model
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.client.endpoint import Endpoint
    from trueline.engine.params import SamplingParams
    from trueline.evaluate.run import Runner
    from trueline.text.tokenizer import Tokenizer

IN_FLIGHT = 64
OF_THE_MODEL = ("top_k", "min_p", "repetition_penalty")
SAMPLING = ("temperature", "top_p", *OF_THE_MODEL, "seed", "max_tokens", "stop")
SPEED_ONLY = ("max_num_seqs", "gpu_memory_utilization")
"""Options of the engine that an evaluation may change when it is resumed."""


class Target(Protocol):
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def identity(self) -> JSON:
        """Of the model, for the settings."""
        ...

    @property
    def default_params(self) -> JSON:
        """Sampling parameters that the model's authors recommend, and a server uses by itself."""
        ...

    def sampling(self, params: SamplingParams) -> JSON:
        """What decides the outputs, for the settings."""
        ...

    def runner(self, template_kwargs: JSON) -> Runner: ...


def open_target(
    model: str,
    concurrency: int | None,
    engine: OfflineEngine,
    connection: ConnectionOptions,
    given: JSON,
) -> Target:
    """`given`: sampling parameters that a server is sent whatever their value."""
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"--concurrency {concurrency}: accepted: numbers from 1 up")
    if ADDRESS.fullmatch(model):
        _refuse_given("an engine here, and this is a server", engine, OfflineEngine())
        server = connection.open(model)
        name = server.pick_model(connection.model)
        return ServerTarget(server, name, concurrency or IN_FLIGHT, tuple(given))
    of_key = replace(ConnectionOptions(), api_key=connection.api_key)  # the environment has one
    _refuse_given("a server, and this is a model", connection, of_key)
    if concurrency is not None:
        if engine.max_num_seqs is not None:
            raise UsageError("--concurrency and --max-num-seqs are the same: give one")
        engine = replace(engine, max_num_seqs=concurrency)
    return EngineTarget(model, find_model(model), engine)


def _refuse_given(whose: str, given: object, default: object) -> None:
    for item in fields(default):  # type: ignore[arg-type]
        if getattr(given, item.name) != getattr(default, item.name):
            raise UsageError(f"--{item.name.replace('_', '-')} is for {whose}")


@dataclass(frozen=True)
class EngineTarget:
    model: str
    directory: Path
    options: OfflineEngine

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from trueline.text.tokenizer import Tokenizer

        return Tokenizer.load(self.directory)

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer.has_chat_form

    @property
    def default_params(self) -> JSON:
        from trueline.engine.params import default_params

        return default_params(self.tokenizer.generation_config)

    def sampling(self, params: SamplingParams) -> JSON:
        return {name: getattr(params, name) for name in SAMPLING}

    @property
    def identity(self) -> JSON:
        file = self.directory / "config.json"
        try:
            config = file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: not readable ({error})") from error
        given = {name: value for name, value in asdict(self.options).items() if value}
        return {
            "name": self.model,
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "engine": {name: value for name, value in given.items() if name not in SPEED_ONLY},
        }

    def runner(self, template_kwargs: JSON) -> Runner:
        from trueline.evaluate.engine_runner import EngineRunner

        return EngineRunner(self.options.load(self.model), template_kwargs)


@dataclass(frozen=True)
class ServerTarget:
    server: Endpoint
    model: str
    concurrency: int
    given: tuple[str, ...]
    has_chat_template: bool = True
    """Nobody can ask: a server without one says so in its answers."""

    @property
    def default_params(self) -> JSON:
        return {}

    def sampling(self, params: SamplingParams) -> JSON:
        """None: the server's choice."""
        unsaid = [name for name in OF_THE_MODEL if name not in self.given]
        return {name: getattr(params, name) for name in SAMPLING} | dict.fromkeys(unsaid)

    @property
    def identity(self) -> JSON:
        return {"name": self.model, "url": self.server.base}

    def runner(self, template_kwargs: JSON) -> Runner:
        from trueline.evaluate.server_runner import ServerRunner

        return ServerRunner(
            self.server, self.model, self.concurrency, template_kwargs, sent=self.given
        )
