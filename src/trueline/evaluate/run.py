"""Evaluate: every item asked, its output scored, in the order of items whatever finished first."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from trueline.engine.params import SamplingParams
from trueline.errors import UsageError
from trueline.evaluate.figures import Figures, summarise
from trueline.evaluate.items import Item, Prompt
from trueline.evaluate.match import Match, without_reasoning
from trueline.evaluate.prompts import PromptFormat
from trueline.evaluate.samples import Sample

if TYPE_CHECKING:
    from trueline.llm import LLM


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """One sample to generate."""

    item: Item
    sample: int
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutput:
    """What came back."""

    text: str = ""
    reasoning: str | None = None
    rendered_prompt: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    finish_reason: str = "error"
    error: str | None = None


Report = Callable[[EvalRequest, EvalOutput], None]


class Runner(Protocol):
    """Generates: in this process (engine_runner.py) or on a server (server_runner.py). A request
    that fails is reported with its error, and the others go on."""

    def run(self, requests: Sequence[EvalRequest], report: Report) -> None: ...
    def plan_lines(self) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    samples: list[Sample]
    """By item and sample, in the order of the items."""
    num_samples: int
    """Of each item."""
    seconds: float
    generated_tokens: int
    """In these seconds; samples of an earlier run that was resumed are not counted."""
    plan: list[str]
    """What the engine here ran with: device, dtype, implementations. Empty of a server."""

    def figures(self) -> Figures:
        return summarise(self.samples, self.num_samples)


def sample_seed(seed: int, item: str, sample: int) -> int:
    """Of one sample: a function of these three, whatever else is evaluated."""
    mixed = hashlib.sha256(f"{seed}/{item}/{sample}".encode()).digest()
    return int.from_bytes(mixed[:8], "big") >> 1


def make_requests(
    items: Sequence[Item], prompts: PromptFormat, params: SamplingParams, num_samples: int
) -> list[EvalRequest]:
    if num_samples < 1:
        raise UsageError(f"--samples {num_samples}: accepted: numbers from 1 up")
    if num_samples > 1 and params.is_greedy:
        raise UsageError(
            f"--samples {num_samples} with --temperature {params.temperature:g}: greedy choice "
            "gives the same output every time; accepted: --samples 1, or a higher temperature"
        )
    found = []
    for item in items:
        prompt = prompts.prompt(item)
        for sample in range(num_samples):
            seed = None if params.is_greedy else sample_seed(params.seed or 0, item.id, sample)
            own = msgspec.structs.replace(params, seed=seed)
            found.append(EvalRequest(item, sample, prompt, own))
    return found


def score(request: EvalRequest, output: EvalOutput, matches: Mapping[str, Match]) -> Sample:
    item = request.item
    answer = without_reasoning(output.text, output.rendered_prompt or "")
    failed = output.error is not None
    found = {
        name: (None, False) if failed else match(answer, item.answer)
        for name, match in matches.items()
    }
    return Sample(
        item=item.id,
        sample=request.sample,
        category=item.category,
        prompt=request.prompt,
        rendered_prompt=output.rendered_prompt,
        prompt_tokens=output.prompt_tokens,
        answer=item.answer,
        text=output.text,
        reasoning=output.reasoning,
        extracted={name: extracted for name, (extracted, _) in found.items()},
        right={name: right for name, (_, right) in found.items()},
        generated_tokens=output.generated_tokens,
        finish_reason=output.finish_reason,
        error=output.error,
    )


def run_requests(
    runner: Runner | None,
    requests: Sequence[EvalRequest],
    matches: Mapping[str, Match],
    *,
    known: Mapping[tuple[str, int], Sample] | None = None,
    keep: Callable[[Sample], None] = lambda sample: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """`known`: samples of an earlier run, which are not generated again; where they are all there,
    no runner is needed. `keep` is called with each new one as soon as it is there."""
    samples = dict(known or {})
    due = [request for request in requests if (request.item.id, request.sample) not in samples]
    new: list[Sample] = []

    def report(request: EvalRequest, output: EvalOutput) -> None:
        sample = score(request, output, matches)
        samples[sample.key] = sample
        new.append(sample)
        keep(sample)
        progress(len(new), len(due))

    start = time.perf_counter()
    if due:
        assert runner is not None
        runner.run(due, report)
    return Evaluation(
        samples=[samples[request.item.id, request.sample] for request in requests],
        num_samples=1 + max((request.sample for request in requests), default=0),
        seconds=time.perf_counter() - start,
        generated_tokens=sum(sample.generated_tokens for sample in new),
        plan=runner.plan_lines() if due and runner else [],
    )


def evaluate(
    llm: LLM,
    items: Iterable[Item],
    params: SamplingParams,
    *,
    matches: Mapping[str, Match],
    num_samples: int = 1,
    prompts: PromptFormat | None = None,
) -> Evaluation:
    """In this process. Without `prompts`: a chat where the model has a template, else the question
    alone as a text to continue.

    >>> greedy = SamplingParams(temperature=0, max_tokens=256)
    >>> evaluate(llm, items, greedy, matches={"number": flexible}).figures()["matches"]
    """
    from trueline.evaluate.engine_runner import EngineRunner

    runner = EngineRunner(llm)
    used = prompts or PromptFormat(chat=runner.has_chat_template)
    return run_requests(runner, make_requests(list(items), used, params, num_samples), matches)
