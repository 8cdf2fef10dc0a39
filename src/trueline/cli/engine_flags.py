"""Every option of the engine as a flag, for the verbs that take all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal  # noqa: F401 - EngineConfig says Literal

from cyclopts import Parameter

from trueline.cli.arguments import parse_choices, parse_facts
from trueline.config import EngineConfig
from trueline.utils.json_types import JSON

NO_FLAG = Parameter(parse=False)


@dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """The engine's options; those given as NAME=VALUE have flags of their own."""

    ops: Annotated[dict[str, str], NO_FLAG] = field(default_factory=dict)
    layers: Annotated[dict[str, str], NO_FLAG] = field(default_factory=dict)
    facts: Annotated[JSON, NO_FLAG] = field(default_factory=dict)

    def config(
        self, op: tuple[str, ...], layer: tuple[str, ...], fact: tuple[str, ...]
    ) -> EngineConfig:
        values = {item.name: getattr(self, item.name) for item in fields(EngineConfig)}
        values |= {
            "ops": parse_choices("--op", op),
            "layers": parse_choices("--layer", layer),
            "facts": parse_facts(fact),
        }
        return EngineConfig(**values)
