"""What a run of `trueline verify` found, as plain data: written and read as JSON, and shown as a
table, JUnit XML or a page."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

import msgspec

from trueline.errors import UsageError, described
from trueline.utils.json_types import JSON, JsonValue

FORMAT = 1
"""Of the JSON: raised when a reader of older reports would misread a new one."""


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_COVERED = "not covered"
    """It could not be forced here; `Check.evidence` says why. Never counted as passed."""
    ERROR = "error"
    """The check itself, or the engine under it, raised."""


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where something was measured or went wrong: what is not known is None."""

    layer: int | None = None
    part: str | None = None
    """Of the layer: "entry" (residual and norm), "mixer", "selection", "experts" (their choice),
    "feed forward"; of the model: "embedding", "head", "logits"."""
    op: str | None = None
    implementation: str | None = None
    composition: str | None = None
    """Which mode's requests."""
    request: int | None = None
    position: int | None = None
    path: str | None = None
    """How the position was computed: "prefill", "decode", "mixed", "captured"."""
    block: int | None = None
    slot: int | None = None

    def __str__(self) -> str:
        parts = [
            f"layer {self.layer}" if self.layer is not None else "",
            self.part or "",
            f"{self.op}={self.implementation}" if self.op else "",
            f"request {self.request}" if self.request is not None else "",
            f"position {self.position}" if self.position is not None else "",
            f"block {self.block}" if self.block is not None else "",
            f"slot {self.slot}" if self.slot is not None else "",
        ]
        told = ", ".join(part for part in parts if part)
        return f"{told} ({self.path})".lstrip() if self.path else told


class Measure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number, beside what noise alone gives and what is accepted."""

    name: str
    value: float
    band: float | None = None
    """What an independent evaluation in the model's dtype shows against float64, in this run."""
    gate: float | None = None
    """The most that is accepted; None: for information."""
    place: Place | None = None
    """Where it is worst."""

    @property
    def good(self) -> bool:
        return self.gate is None or self.value <= self.gate


class Check(msgspec.Struct, kw_only=True, omit_defaults=True):
    id: str
    """`group/name`, as `--only` takes it."""
    invariant: str
    what: str
    """In a sentence."""
    status: Status
    evidence: str = ""
    """What really ran; of what failed, the message; of what was not covered, why."""
    ran: dict[str, str] = {}
    """Implementations by op."""
    measures: list[Measure] = []
    place: Place | None = None
    """The first wrong one."""
    unusual: list[str] = []
    """What fails nothing, but should be looked at."""
    seconds: float = 0.0
    replay: str | None = None
    """A file that `trueline replay` takes."""

    @property
    def group(self) -> str:
        return self.id.partition("/")[0]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Error along something: the largest of each."""

    title: str
    along: str
    """ "layer", "position" or "composition"."""
    labels: list[str]
    values: list[float]
    band: list[float]
    gate: list[float]


class Alternative(msgspec.Struct, frozen=True):
    token: int
    text: str
    logprob: float


class TokenDiff(msgspec.Struct, frozen=True, kw_only=True):
    """A position whose likeliest token, or whose logprobs the most, differ from the reference's."""

    place: Place
    before: str
    """The text that leads up to it."""
    ours: list[Alternative]
    reference: list[Alternative]
    kl: float


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of one kind of layer part in the model's dtype, as measured in this run: relative error
    of the worst row."""

    what: str
    dtype: str
    value: float
    gate: float


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest error injected at a place that this run's checks have seen."""

    place: Place
    what: str
    """How it was injected; the number is its size."""
    smallest: float | None
    """None: not even the largest."""
    unseen: float | None
    """The largest that was not seen; None: all were."""
    caught_by: str | None
    named: Place | None
    """Where the check said it was."""


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A known bug, switched on."""

    id: str
    what: str
    outcome: str
    """ "caught", "survived", "no effect" (what it replaces does not run in this model, or gave the
    same numbers), "not met" (nor does it run anywhere on a machine like this) or "not here"."""
    caught_by: str | None = None
    """The first check that failed."""
    invariant: str | None = None
    layer: str = "none"
    """The first wrong layer: a number, "all", or "none"."""
    position: int | None = None
    evidence: str = ""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    trueline: str
    commit: str | None
    python: str
    torch: str
    triton: str | None
    platform: str
    cpu: str
    threads: int
    native: str
    """What the C++ kernels were built for; "off" where they are not used."""
    gpu: str | None
    driver: str | None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    family: str
    dtype: str
    layers: int
    parameters: int
    bytes: int
    fingerprint: str
    """Of config.json and the checkpoint's headers and sizes."""


class Report(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    model: Model
    tier: str
    only: list[str] = []
    """What was asked for of the tier (`--only`): empty is all of it."""
    skip: list[str] = []
    """What was left out of it (`--skip`): it is not among the checks."""
    command: str = ""
    """That reproduces the run, as a shell reads it."""
    options: dict[str, str]
    """Of the engine, those that are not the defaults."""
    started: str
    """ISO 8601, UTC."""
    seconds: float
    interrupted: bool = False
    """By the user: checks that had not begun are not covered."""
    estimated: float | None = None
    """Seconds, as told before the checks began."""
    environment: Environment
    plan: list[str]
    checks: list[Check]
    bands: list[Band] = []
    curves: list[Curve] = []
    token_diffs: list[TokenDiff] = []
    power: list[Power] = []
    faults: list[FaultRow] = []

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status in (Status.FAILED, Status.ERROR)]

    @property
    def unusual(self) -> list[str]:
        return [each for check in self.checks for each in check.unusual]

    @property
    def passed(self) -> bool:
        """Nothing failed, something passed, and all was run that was asked for."""
        some = any(check.status == Status.PASSED for check in self.checks)
        return some and not self.failed and not self.interrupted

    def counts(self) -> dict[Status, int]:
        return {status: sum(c.status == status for c in self.checks) for status in Status}


def encode(data: msgspec.Struct) -> bytes:
    """As JSON. It has no NaN and no infinity: they are the strings "nan", "inf" and "-inf"."""
    plain = _as_json(msgspec.to_builtins(data, enc_hook=_plain))
    return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def _plain(value: object) -> str | float:
    """Of what torch and numpy derive from text and numbers, as their versions are."""
    match value:
        case str():
            return str(value)
        case float():
            return float(value)
    raise NotImplementedError(f"{type(value).__name__} in a report")


def _as_json(value: JsonValue) -> JsonValue:
    match value:
        case dict():
            return {_as_json(key): _as_json(each) for key, each in value.items()}
        case list():
            return [_as_json(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
        case str():  # a path or a text may have bytes that are no UTF-8
            return value.encode(errors="backslashreplace").decode()
    return value


def write(report: Report, path: Path) -> None:
    write_file(path, encode(report))


def write_file(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path}: not writable ({error.strerror})") from error


def read(path: Path) -> Report:
    """One that a run wrote; anything else is refused by name."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: not readable ({error.strerror})") from error
    accepted = f"accepted: a report that trueline verify wrote, of format 1 to {FORMAT}"
    try:
        head: JSON = msgspec.json.decode(content, type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: no JSON object ({described(error)}); {accepted}") from error
    version = head.get("format")
    if type(version) is not int or version < 1 or "checks" not in head:
        raise UsageError(f"{path}: JSON, but no report of trueline verify; {accepted}")
    if version > FORMAT:
        raise UsageError(
            f"{path}: a report of format {version}, written by a newer Trueline; {accepted}"
        )
    try:
        # not strict: "nan" and "inf" are numbers
        return msgspec.convert(head, Report, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: a damaged report ({error}); {accepted}") from error
