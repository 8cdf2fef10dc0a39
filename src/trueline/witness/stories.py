"""The five stories, as faults to switch on in a running engine: which model each is shown on, and
what accuracy cannot show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from types import FunctionType
from typing import Any, Literal

from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec
from trueline.utils.json_types import JSON
from trueline.verify.faults import Fault, Make
from trueline.verify.faults.table import FAULTS

STORIES = {
    1: "Ling-2.6: partial_rotary_factor halves rope in the MLA layers",
    2: "Ling-2.6: decode rows indexed as if prefill came first",
    3: "DeepSeek-V3: softmax scale from the cache row, without mscale²; V4's rules",
    4: "DeepSeek-V3.2, GLM-5: the indexer's key cache and rope",
    5: "Kimi-K2.5: split metadata for fewer heads than the kernel pads to",
}
_FAULTS = {fault.id: fault for fault in FAULTS}


@dataclass(frozen=True, kw_only=True)
class StoryFault:
    """What went wrong in a story, on one model; `faults` are switched on together."""

    story: int
    model: str
    what: str
    faults: tuple[str, ...]
    historical: bool = False
    """The form that the public engine had; others are its relatives."""
    options: JSON = field(default_factory=dict)
    """Of the engine, where the fault needs them."""
    only_mixed: bool = False
    """It acts where a step has decode and prefill rows: alone, a request is right."""
    device: Literal["any", "cpu", "cuda"] = "any"
    emulated: bool = False
    """Its effect is put in, not its cause."""
    of_mscale: bool = False
    """It leaves out YaRN's mscale², so a model must have one."""

    def not_covered(self, spec: ModelSpec, device: str) -> str | None:
        """Why it cannot be shown here."""
        if self.device == "cuda" != device:
            return "needs a GPU: it is in the launch plan of a GPU kernel"
        if self.device == "cpu" != device:
            return "emulated on a CPU only: a GPU has the real one"
        if self.of_mscale and all(
            layer.mixer.rope.score_scale == 1.0
            for layer in spec.layers
            if isinstance(layer.mixer, MLASpec)
        ):
            return "this model has no mscale²"
        return None


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """What leaves the accuracy as it is; a check catches it."""

    story: int
    model: str
    what: str
    fault: str

    @property
    def check(self) -> str:
        return _FAULTS[self.fault].check


_BLOCK_1: JSON = {"block_size": 1, "index_cache_dtype": "e4m3fn"}
_CACHE_ROW = ("spec-scale-of-cache-row", "spec-no-mscale")


def _indexer(model: str, pairing: str) -> tuple[StoryFault, ...]:
    """Story 4 is the same for both families."""
    return (
        StoryFault(
            story=4,
            model=model,
            what="index keys read in shuffled layout at block size 1",
            faults=("engine-index-read-shuffled",),
            historical=True,
            options=_BLOCK_1,
        ),
        StoryFault(
            story=4,
            model=model,
            what="rope taken to work in place: its result is dropped",
            faults=("engine-index-unrotated",),
            historical=True,
        ),
        StoryFault(
            story=4,
            model=model,
            what="index queries and keys rotated twice",
            faults=("engine-index-rotated-twice",),
        ),
        StoryFault(
            story=4,
            model=model,
            what="the indexer's rope with the other pairing",
            faults=(pairing,),
        ),
    )


_V4 = tuple(
    StoryFault(story=3, model="witness-v4", what=what, faults=(fault,))
    for what, fault in (
        ("cos and sin with mscale", "spec-v4-cos-sin"),
        ("softmax scale with mscale²", "engine-v4-mscale"),
        ("compressed entries visible one token late", "entry-one-late"),
        ("compressor tails in blocks given away too early", "tails-of-a-reused-block"),
        ("compressor tails of another request", "tails-of-another"),
    )
)

STORY_FAULTS: tuple[StoryFault, ...] = (
    StoryFault(
        story=1,
        model="witness-ling",
        what="rope on half of the channels, table made for half",
        faults=("engine-half-rotation",),
        historical=True,
    ),
    StoryFault(
        story=2,
        model="witness-ling",
        what="state slots of decode rows taken at prefill offsets",
        faults=("state-slots-prefill-first",),
        historical=True,
        only_mixed=True,
    ),
    StoryFault(
        story=2,
        model="witness-ling",
        what="outputs of decode rows shifted by one row",
        faults=("state-rows-shifted",),
    ),
    StoryFault(
        story=3,
        model="witness-v3",
        what="softmax scale 1/√(cache row's width), no mscale²",
        faults=_CACHE_ROW,
        historical=True,
        of_mscale=True,
    ),
    StoryFault(
        story=3,
        model="witness-v3",
        what="softmax scale 1/√(cache row's width)",
        faults=("spec-scale-of-cache-row",),
    ),
    StoryFault(
        story=3,
        model="witness-v3",
        what="softmax scale without mscale²",
        faults=("spec-no-mscale",),
        of_mscale=True,
    ),
    StoryFault(
        story=3,
        model="witness-ling",
        what="softmax scale 1/√(cache row's width)",
        faults=("spec-scale-of-cache-row",),
    ),
    *_V4,
    *_indexer("witness-v32", "engine-index-pairing"),
    *_indexer("witness-glm5", "engine-index-pairing-glm"),
    StoryFault(
        story=5,
        model="witness-k25",
        what="work list sized from the unpadded heads",
        faults=("work-list-unpadded-heads",),
        historical=True,
        device="cuda",
    ),
    StoryFault(
        story=5,
        model="witness-k25",
        what="head tiles counted from the unpadded heads",
        faults=("split-unpadded-heads",),
        device="cuda",
    ),
    StoryFault(
        story=5,
        model="witness-k25",
        what="half of the heads zero in decode",
        faults=("decode-half-heads",),
        historical=True,
        device="cpu",
        emulated=True,
    ),
)
UNSEEN = (
    Unseen(
        story=1,
        model="witness-ling",
        what="rope on half of the channels, right frequencies",
        fault="engine-half-rotation-kept-frequencies",
    ),
    Unseen(
        story=2,
        model="witness-ling",
        what="recurrent state in bfloat16",
        fault="state-rounded",
    ),
)


@contextmanager
def switched_on(fault: StoryFault) -> Iterator[Counter[str]]:
    """The package with the faults in it. Counts how often each replaced function ran, and for
    numbers only where the number came out different: zero means that nothing was broken."""
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in fault.faults:
            stack.enter_context(_counted(_FAULTS[name], counts).seeded())
        yield counts


def _counted(fault: Fault, counts: Counter[str]) -> Fault:
    def make(original: Any) -> Any:
        broken = fault.broken(original)
        if isinstance(broken, property):
            return property(lambda self: _compared(self, original, broken, fault.id, counts))
        assert isinstance(broken, FunctionType), f"{fault.id}: what it replaces cannot be counted"
        return _counting(broken, fault.id, counts)

    return replace(fault, broken=make)


def _compared(
    spec: object, original: property, broken: property, name: str, counts: Counter[str]
) -> object:
    value = broken.__get__(spec)
    counts[name] += value != original.__get__(spec)
    return value


def _counting(broken: Make, name: str, counts: Counter[str]) -> Make:
    @wraps(broken)
    def run(*given: Any, **options: Any) -> Any:
        counts[name] += 1
        return broken(*given, **options)

    return run
