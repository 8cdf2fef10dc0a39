"""`trueline witness`: what the faults of the five stories cost, in right answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.output import tables
from trueline.errors import UsageError, did_you_mean
from trueline.utils.builtin import BUILTIN_MODELS, BuiltinModel
from trueline.utils.progress import progress_bar

if TYPE_CHECKING:
    from trueline.witness.run import WitnessFigures


COUNTS = (96, 32)
"""Of arithmetic and of long problems."""


def witness(
    model: tuple[str, ...] = (),
    /,
    *,
    items: int = COUNTS[0],
    long_items: int = COUNTS[1],
    device: Literal["auto", "cpu", "cuda"] = "auto",
    batch_invariant: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    figure: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    demo: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show what accuracy bugs of public engines cost: the built-in models' accuracy without them,
    and with each switched on.

    Each model is asked alone (one request at a time), in a mixed batch (up to 64 requests at once,
    prefill and decode in the same steps), and in that batch with each fault of the five stories
    (docs/witness.md). Ends with exit code 1 if a fault had no effect, or if with --batch-invariant
    an answer in the batch differs from the one given alone.

    Parameters
    ----------
    model
        Names of built-in models. Default: all.
    items
        Held-out arithmetic problems of 2 to 5 operations, for each model. Alone, every second
        one is asked.
    long_items
        Held-out problems of 600 to 850 tokens, likewise.
    device
        auto is the GPU where there is one.
    batch_invariant
        The same bits for a request, whatever shares its steps: then answers in the batch must
        be those given alone.
    out
        Write the figures to this file, as JSON.
    figure
        Draw the figures into this SVG file.
    as_json
        Print one JSON object instead of tables.
    demo
        One question, its worked answer, and 50 problems without and with one fault: less than a
        minute.
    """
    if demo:
        if model or out or figure or as_json or batch_invariant or (items, long_items) != COUNTS:
            raise UsageError(
                "--demo takes --device and nothing else: its model and problems are fixed"
            )
        from trueline.witness.demo import show_demo

        return show_demo(device)
    models = _models(model)
    if items < 1 or long_items < 0:
        raise UsageError("--items takes numbers from 1 up, --long-items from 0 up")
    for file in (out, figure):
        if file is not None:
            _require_writable(file)
    found = _measure(models, (items, long_items), device, batch_invariant)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if out is not None:
        out.write_text(text + "\n")
    if figure is not None:
        from trueline.witness.figure import draw

        figure.write_text(draw(found))
    if as_json:
        print(text)
    else:
        from trueline.witness.report import report

        print(report(found, tables().width))
    complaints = list(_complaints(found))
    for text in complaints:
        print(f"trueline: {text}", file=sys.stderr)
    return int(bool(complaints))


def _require_writable(file: Path) -> None:
    """Before minutes of work, not after them."""
    try:
        file.open("a").close()
    except OSError as error:
        raise UsageError(f"{file}: not writable ({error.strerror})") from error


def _models(names: tuple[str, ...]) -> list[BuiltinModel]:
    for name in names:
        if name not in BUILTIN_MODELS:
            raise UsageError(
                f"model '{name}': accepted: {', '.join(BUILTIN_MODELS)}"
                f"{did_you_mean(name, BUILTIN_MODELS)}"
            )
    return [BUILTIN_MODELS[name] for name in dict.fromkeys(names or BUILTIN_MODELS)]


def _measure(
    models: list[BuiltinModel], items: tuple[int, int], device: str, batch_invariant: bool
) -> WitnessFigures:
    from trueline.witness.run import ProblemSets, num_answers, run

    sets = ProblemSets.draw(*items)
    total, done = num_answers(models, sets), 0
    with progress_bar("answers", in_bytes=False) as progress:

        def report() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        return run(models, sets, device, report, batch_invariant=batch_invariant)


def _complaints(found: WitnessFigures) -> Iterator[str]:
    for model in found["models"]:
        differing = sum(each["answers_differ"] for each in model["right"].values())
        if found["batch_invariant"] and differing:
            yield f"{model['model']}: {differing} answers in the batch differ from those alone"
        for fault in model["faults"]:
            if fault["not_covered"] is None and not fault["acted"]:
                what = "answer" if fault["historical"] else "logprob"
                yield (
                    f"{model['model']}: '{fault['what']}' was switched on and changed no {what}: "
                    "the fault does not act on this engine"
                )
