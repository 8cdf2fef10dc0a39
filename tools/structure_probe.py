"""What one request touches in the package on PYTHONPATH, as JSON: run by structure.py, in a process
of its own for every revision.

    python tools/structure_probe.py SCRATCH_DIRECTORY

The path is measured: Python's profile hook notes every function of the package that runs inside
`LLM.generate` (or, for captured steps, inside `EngineCore.add` and `EngineCore.step`). Loading a
model is not on a request's path. So are the objects: of all that came to exist since the request
did, those that hold its id, its prompt or its parameters, seen among the arguments of a function's
first call or among all objects after a step.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import trueline

PACKAGE = str(Path(trueline.__file__).parent)
HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
ROOTS = ("EngineCore.add", "EngineCore.step")
FAMILIES = ("deepseek_v3", "bailing_moe_v2_5", "deepseek_v32")
"""Latent; hybrid (linear and latent); sparse."""
CAPTURED = ("ling-shallow", "v32-shallow", "v3-shallow")
"""Cases of verify's check "graph = eager"; those that a revision has not are left out."""
NOT_ENGINE = ("verify", "tiny", "reference")
REQUEST_ID = "structure-probe"
LATER = 3
"""Steps after which what the first step knew is still held, if it lasts."""
PROMPT = [(37 * i + 11) % 97 for i in range(40)]


class Recorder:
    """Functions of the package that ran while it was on, or below one of `roots`."""

    def __init__(self, roots: tuple[str, ...] = ()) -> None:
        self.roots, self.depth, self.codes = roots, 0 if roots else 1, set[CodeType]()

    def __enter__(self) -> Self:
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return
        if code.co_qualname in self.roots:
            self.depth += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and self.depth:
            if code not in self.codes:
                self.first(frame)
            self.codes.add(code)

    def first(self, frame: FrameType) -> None:
        """A function is called for the first time."""


class Carriers(Recorder):
    """Also the objects that carry the request."""

    def __init__(self, params: object) -> None:
        super().__init__()
        self.params, self.steps = params, 0
        self.found: dict[int, object] = {}
        """Kept alive, so that no two have the same identity."""
        self.early: list[object] = []
        self.lasting: set[str] = set()
        self.old = {id(each): each for each in gc.get_objects() if is_package(each)}
        gc.freeze()  # from now on get_objects() lists what is new

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        super().note(frame, event, arg)
        # not while a step runs: a list of all objects would hold what is being built
        if event == "return" and frame.f_code.co_qualname == "LLMEngine.step":
            self.look(gc.get_objects())
            self.steps += 1
            if self.steps == LATER:
                self.lasting = {type(each).__qualname__ for each in self.early if self.lives(each)}
            elif self.steps == 1:
                self.early = list(self.found.values())

    def lives(self, each: object) -> bool:
        """Whether the engine, and not only this list, still holds it."""
        holders = gc.get_referrers(each)
        return any(
            holder is not self.found
            and holder is not self.early
            and not isinstance(holder, FrameType)
            for holder in holders
        )

    def first(self, frame: FrameType) -> None:
        self.look(list(frame.f_locals.values()))

    def look(self, objects: list[object]) -> None:
        for each in objects:
            new = id(each) not in self.old and each is not self.params
            if is_package(each) and new and any(map(self.is_ours, fields(each))):
                self.found[id(each)] = each

    def is_ours(self, value: object) -> bool:
        if isinstance(value, str):
            return REQUEST_ID in value
        if isinstance(value, list) and value and isinstance(value[0], str):
            return any(REQUEST_ID in each for each in value)
        return value is self.params or is_prompt(value)

    def report(self) -> dict[str, Any]:
        kinds = {type(each).__qualname__ for each in self.found.values()}
        named = [field for each in self.found.values() for field in named_fields(each)]
        ids = {value for _, value in named if isinstance(value, str) and REQUEST_ID in value}
        ids |= {f"{name} {value}" for name, value in named if name == "id"}
        last = [each for each in self.found.values() if type(each).__qualname__ in self.lasting]
        lists = {id(value) for each in last for value in fields(each) if is_prompt(value)}
        return {
            "lasting": sorted(self.lasting),
            "brief": sorted(kinds - self.lasting),
            "ids": sorted(ids),
            "token_lists": len(lists),
        }


def is_package(each: object) -> bool:
    return type(each).__module__.startswith("trueline")


def is_prompt(value: object) -> bool:
    """The prompt's tokens, with or without generated ones after them."""
    return type(value) is list and value[: len(PROMPT)] == PROMPT


def fields(each: object) -> Iterator[object]:
    """Of a class with slots (msgspec's structs have them too) or without."""
    yield from (value for _, value in named_fields(each))


def named_fields(each: object) -> Iterator[tuple[str, object]]:
    yield from getattr(each, "__dict__", {}).items()
    slots = [name for base in type(each).__mro__ for name in vars(base).get("__slots__", ())]
    for name in (*slots, *getattr(each, "__struct_fields__", ())):
        yield name, getattr(each, name, None)


def measured(codes: set[CodeType]) -> dict[str, list[int]]:
    """By file: its lines, and those of functions that ran."""
    ran: dict[str, set[int]] = {}
    for code in codes:
        lines = [line for _, _, line in code.co_lines() if line]
        span = range(code.co_firstlineno, max(lines, default=code.co_firstlineno) + 1)
        ran.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), set()).update(span)
    return {
        name: [len(Path(PACKAGE, name).read_text().splitlines()), len(lines)]
        for name, lines in sorted(ran.items())
        if name.split("/")[0] not in NOT_ENGINE
    }


def main(scratch: Path) -> None:
    from trueline import LLM, SamplingParams

    paths: dict[str, set[CodeType]] = {}
    for family in FAMILIES:
        directory = scratch / family
        command = [sys.executable, "-m", "trueline", "make-tiny", family, str(directory)]
        subprocess.run(command, check=True, capture_output=True)
        llm = LLM(directory)
        with Recorder() as recorder:
            llm.generate(["true to the line"], SamplingParams(max_tokens=6), use_tqdm=False)
        paths[family] = recorder.codes
    params = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.1, logprobs=1,
                            max_tokens=6)  # fmt: skip
    engine = LLM(scratch / "deepseek_v3").llm_engine
    with Carriers(params) as carriers:
        engine.add_request(REQUEST_ID, {"prompt_token_ids": list(PROMPT)}, params)
        while engine.has_unfinished_requests():
            engine.step()
    captured = captured_steps(scratch)
    wide = set.union(*paths.values(), captured)
    print(json.dumps({
        "offline": measured(paths["deepseek_v3"]),
        "wide": measured(wide),
        "captured": len(captured),
        "objects": carriers.report(),
    }))  # fmt: skip


def captured_steps(scratch: Path) -> set[CodeType]:
    """Decode steps over fixed buffers; without a GPU, run again with interpreted kernels."""
    from trueline.verify.cases import CASES, make_subject
    from trueline.verify.checks import CHECKS

    with Recorder(ROOTS) as recorder:
        for name in (name for name in CAPTURED if name in CASES):
            CHECKS["graph = eager"](make_subject(name, scratch / name))
    return recorder.codes


if __name__ == "__main__":
    sys.path.insert(0, str(HELPERS))
    import interpreter  # noqa: F401  # before anything imports our kernels

    main(Path(sys.argv[1]))
