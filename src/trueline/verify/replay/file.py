"""The file: safetensors, with what is said of its tensors as JSON in the header.

`weights.*` are tensors of the checkpoint, as stored and under their own names; all others are rows
of requests, by position: `0.input` is what the engine gave request 0 to the part that failed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trueline.config import EngineConfig
from trueline.errors import UsageError
from trueline.reference.model import FEED, MIX, Half
from trueline.utils.json_types import JSON
from trueline.verify.engine import Ask
from trueline.verify.report import Environment, Model, Place
from trueline.verify.suite.judgement import BandOf, Judgement

FORMAT = 2
KEY = "trueline_replay"
WEIGHTS = "weights."
HALVES: Mapping[str, Half] = {"mixer": MIX, "feed forward": FEED}
HEAD = "head"
STORED, STORED_AT = "stored.", "stored_at."
"""Rows of a kind of cache that rounds them, and the positions at which they are complete."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A composition of requests; its changes of the engine's options are in the file's."""

    name: str
    invariant: str
    what: str
    asks: list[Ask]
    same_bits: JSON | None = None
    abort: dict[int, int] = {}
    turned_over: bool = False
    ranks: int = 1
    expert_parallel: bool = False
    seed: int = 0
    """Of the run: what other requests say that come before these."""


class OpChecked(msgspec.Struct, frozen=True):
    op: str
    implementation: str
    check: str
    dtype: str


class Followed(msgspec.Struct, kw_only=True):
    """A request, as it was computed."""

    tokens: list[int]
    paths: list[str]
    """By position."""
    reused: list[int] = []


class HalfOfLayer(msgspec.Struct, kw_only=True):
    """Which part of the model is in the file, and how it was judged."""

    layer: int
    half: str
    """One of HALVES, or HEAD: then `layer` is the number of layers."""
    part: str
    """What was wrong of it."""
    request: int
    position: int
    """The first wrong one."""
    value: float
    """The worst, at any position, or that of the median row, where this was off too far."""
    accepted: float
    stored: str
    """The dtype of plain weights."""
    numerics: str
    key_noise: float
    requests: list[Followed]
    alone: bool | None = None
    """Whether it was wrong, too, when it ran alone on these inputs; None: that was not tried."""


class Header(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    check: str
    invariant: str
    what: str
    evidence: str
    model: Model
    environment: Environment
    plan: list[str]
    implementations: dict[str, str]
    config: JSON
    """Options of the engine that are not the defaults, those that the plan chose among them."""
    config_json: str
    """The model's."""
    compute: str
    """The dtype that the engine computed in."""
    bands: list[tuple[BandOf, float]]
    """Noise: relative errors."""
    place: Place | None = None
    asked: Asked | None = None
    op: OpChecked | None = None
    half: HalfOfLayer | None = None
    left_out: list[str] = []
    """What was too large for the file."""

    def noise(self) -> Judgement:
        return Judgement(bands=dict(self.bands))

    def engine_config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(**{**self.config, **changes})


@dataclass
class Recorded:
    """A header and its tensors."""

    header: Header
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """By their names in the checkpoint."""

    def of_request(self, name: str, request: int) -> Tensor | None:
        return self.tensors.get(f"{request}.{name}")

    def stored(self, request: int) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """By kind of cache: rows by position."""
        for name, rows in self.tensors.items():
            if name.startswith(prefix := f"{request}.{STORED}"):
                at = self.tensors[f"{request}.{STORED_AT}{name.removeprefix(prefix)}"]
                yield name.removeprefix(prefix), dict(zip(at.tolist(), rows, strict=True))

    @contextmanager
    def as_model(self) -> Iterator[Path]:
        """A directory with the model's config and what the file has of its weights."""
        with tempfile.TemporaryDirectory(prefix="trueline-replay-") as made:
            directory = Path(made)
            (directory / "config.json").write_text(self.header.config_json)
            if self.weights:
                save_file(self.weights, directory / "model.safetensors")
            yield directory


def differing(config: EngineConfig) -> JSON:
    """Options that are not the defaults. Where it runs is for whoever runs it again to say."""
    default = EngineConfig()
    found = {
        item.name: getattr(config, item.name)
        for item in fields(config)
        if getattr(config, item.name) != getattr(default, item.name)
    }
    found.pop("device", None)
    plain: JSON = json.loads(msgspec.json.encode(found))
    return plain


def write(recorded: Recorded, path: Path) -> None:
    tensors = {name: each.contiguous() for name, each in recorded.tensors.items()}
    tensors |= {WEIGHTS + name: each for name, each in recorded.weights.items()}
    if not tensors:  # a file of this format holds one at least
        tensors["nothing"] = torch.zeros(1)
    text = msgspec.json.encode(recorded.header).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={KEY: text})


def read(path: Path) -> Recorded:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; accepted: what trueline verify --replay-dir wrote")
    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(KEY)
            if text is None:
                raise UsageError(
                    f"{path}: no replay file; accepted: what trueline verify --replay-dir wrote"
                )
            header = _header(path, text)
            found = {name: opened.get_tensor(name) for name in list(opened.keys())}
    except SafetensorError as error:
        raise UsageError(f"{path}: damaged, or no replay file: {error}") from error
    found.pop("nothing", None)
    weights = {
        name.removeprefix(WEIGHTS): found.pop(name)
        for name in list(found)
        if name.startswith(WEIGHTS)
    }
    return Recorded(header, found, weights)


def _header(path: Path, text: str) -> Header:
    number = json.loads(text).get("format")
    if number != FORMAT:
        raise UsageError(
            f"{path}: replay format {number}; accepted: {FORMAT}. Replay it with the version of "
            "trueline that wrote it"
        )
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from error
