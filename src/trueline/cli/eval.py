"""`trueline eval`: how many questions a model answers rightly, and how two results differ."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Parameter

from trueline.cli.arguments import model_or_default
from trueline.cli.completion import MODEL
from trueline.cli.eval_options import EvalSampling, PromptOptions, TaskOptions
from trueline.cli.eval_target import ServerTarget, open_target
from trueline.cli.generate import OfflineEngine
from trueline.cli.output import tables
from trueline.cli.remote import ConnectionOptions
from trueline.errors import UsageError
from trueline.utils.json_types import JSON
from trueline.utils.progress import progress_bar

if TYPE_CHECKING:
    from trueline.cli.eval_target import Target
    from trueline.evaluate.prompts import PromptFormat
    from trueline.evaluate.run import EvalRequest
    from trueline.evaluate.tasks import Task

Json = Annotated[bool, Parameter(name="--json", negative=())]
ENGINE, SERVER = Parameter(name="*", group="Engine"), Parameter(name="*", group="Server")

command = App(name="eval")


@command.default
def evaluate(
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    task: TaskOptions = TaskOptions(),  # noqa: B008
    prompts: PromptOptions = PromptOptions(),  # noqa: B008
    sampling: EvalSampling = EvalSampling(),  # noqa: B008
    out: Path | None = None,
    concurrency: int | None = None,
    engine: Annotated[OfflineEngine, ENGINE] = OfflineEngine(),  # noqa: B008
    connection: Annotated[ConnectionOptions, SERVER] = ConnectionOptions(),  # noqa: B008
    as_json: Json = False,
) -> int:
    """Accuracy of a model or a server on a task, with its 95 % interval.

    Fails (1) where an item ended in error. `trueline eval diff A B` compares two results.

    Parameters
    ----------
    model
        A model directory, a built-in model, a hub id (owner/name), or the address of a
        server, as 127.0.0.1:8000. Default: the built-in witness-v3.
    out
        Keep samples and results in this directory, and go on where an earlier run with the same
        settings stopped.
    concurrency
        Requests in flight on a server (64); with an engine here, its --max-num-seqs.
    as_json
        Print the results as one JSON object.
    """
    from trueline.evaluate.run import make_requests

    chosen = task.read()
    sampling.params(chosen, {})  # what is wrong with it is told before a model is looked for
    kwargs = prompts.kwargs()
    name = model_or_default(model)
    target = open_target(name, concurrency, engine, connection, sampling.given())
    params = sampling.params(chosen, target.default_params)
    form = prompts.format(chosen, target.has_chat_template)
    if not form.chat:
        if params.max_tokens is None and isinstance(target, ServerTarget):
            raise UsageError("give --max-tokens: the protocol's default for a completion is 16")
        stop = (*params.stop, *(each for each in chosen.stop if each not in params.stop))
        params = msgspec.structs.replace(params, stop=stop)
    requests = make_requests(chosen.items, form, params, sampling.samples)
    settings = {
        **_settings(chosen, form, requests),
        "samples": sampling.samples,
        "sampling": target.sampling(params),
        "template_kwargs": kwargs,
        "model": target.identity,
    }
    print(f"{chosen.name}: {len(chosen.items)} items as {form.describe()}", file=sys.stderr)
    results = _run(target, kwargs, chosen, requests, settings, out)
    if as_json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
    else:
        from trueline.evaluate.report import print_results

        print_results(tables(), results)
    return int(results["figures"]["errors"] > 0)


def _settings(task: Task, form: PromptFormat, requests: list[EvalRequest]) -> JSON:
    from trueline.evaluate.items import digest

    prompts = [request.prompt for request in requests if request.sample == 0]
    return {
        "task": task.name,
        "items": len(task.items),
        "items_sha256": digest(task.items, prompts),
        "matches": list(task.matches),
        "form": "chat" if form.chat else "completion",
        "num_fewshot": len(form.examples),
        "instruction": form.instruction,
        "system": form.system,
    }


def _run(
    target: Target,
    template_kwargs: JSON,
    task: Task,
    requests: list[EvalRequest],
    settings: JSON,
    out: Path | None,
) -> JSON:
    from trueline.evaluate.results import ResultsDirectory, results_of
    from trueline.evaluate.run import run_requests

    with ResultsDirectory.open(out, settings) if out else nullcontext() as kept:
        for note in kept.notes if kept else ():
            print(note, file=sys.stderr)
        known = kept.known if kept else {}
        runner = target.runner(template_kwargs) if len(known) < len(requests) else None
        with progress_bar(f"evaluating {task.name}", in_bytes=False) as progress:
            evaluation = run_requests(
                runner,
                requests,
                task.matches,
                known=known,
                keep=kept.append if kept else lambda sample: None,
                progress=progress,
            )
        return kept.finish(evaluation) if kept else results_of(evaluation, settings)


@command.command(name="diff")
def diff_results(
    a: Path,
    b: Path,
    /,
    *,
    match: str | None = None,
    show: int = 5,
    as_json: Json = False,
) -> None:
    """Compare two results of the same items, pair by pair.

    Parameters
    ----------
    a
        A directory of `eval --out`, or its samples.jsonl.
    b
        Another one.
    match
        Which of a task's matches counts. Default: its first.
    show
        How many of the samples that differ are shown, those first that only one side has right.
    as_json
        Print one JSON object.
    """
    from trueline.evaluate.diff import diff, load

    if show < 0:
        raise UsageError(f"--show {show}: accepted: numbers from 0 up")
    found = diff(load(a), load(b), match, show)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        from trueline.evaluate.report import print_diff

        print_diff(tables(), found)
