"""The figures of an evaluation: accuracies with their intervals, whole and in parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

from trueline.evaluate.samples import Sample
from trueline.evaluate.statistics import accuracy_interval

SHORTEST_BUCKET = 64
"""Prompt lengths are counted up to this many tokens, to twice as many, and so on."""


class Accuracy(TypedDict):
    accuracy: float
    interval: tuple[float, float]
    """95 %."""
    right: int
    """Samples, not items, where an item has several."""


class Part(TypedDict):
    items: int
    samples: int
    matches: dict[str, Accuracy]


class Figures(Part):
    categories: dict[str, Part]
    prompt_lengths: dict[str, Part]
    """By tokens of the prompt, as "64–127"."""
    finish_reasons: dict[str, int]
    errors: int
    first_error: str | None
    prompt_tokens: int
    generated_tokens: int


def summarise(samples: Sequence[Sample], num_samples: int) -> Figures:
    categories = _parts(samples, num_samples, lambda sample: sample.category)
    lengths = _parts(samples, num_samples, lambda sample: bucket(sample.prompt_tokens))
    errors = [sample.error for sample in samples if sample.error is not None]
    reasons = Counter(sample.finish_reason for sample in samples)
    return {
        **part(samples, num_samples),
        "categories": {name: one for name, one in categories.items() if name},
        "prompt_lengths": dict(sorted(lengths.items(), key=lambda each: _bucket_start(each[0]))),
        "finish_reasons": dict(sorted(reasons.items())),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens": sum(sample.prompt_tokens or 0 for sample in samples),
        "generated_tokens": sum(sample.generated_tokens for sample in samples),
    }


def part(samples: Sequence[Sample], num_samples: int) -> Part:
    names = samples[0].right if samples else ()
    by_item = group(samples, lambda sample: sample.item)
    return {
        "items": len(by_item),
        "samples": len(samples),
        "matches": {name: _accuracy(name, by_item, num_samples) for name in names},
    }


def item_mean(samples: Sequence[Sample], match: str) -> float:
    return sum(sample.right[match] for sample in samples) / len(samples)


def group(samples: Iterable[Sample], key: Callable[[Sample], str]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(key(sample), []).append(sample)
    return found


def bucket(tokens: int | None) -> str:
    if tokens is None:
        return "unknown"
    if tokens < SHORTEST_BUCKET:
        return f"1–{SHORTEST_BUCKET - 1}"
    start = SHORTEST_BUCKET << (tokens // SHORTEST_BUCKET).bit_length() - 1
    return f"{start}–{2 * start - 1}"


def _bucket_start(name: str) -> float:
    return math.inf if name == "unknown" else int(name.partition("–")[0])


def _accuracy(match: str, by_item: dict[str, list[Sample]], num_samples: int) -> Accuracy:
    means = [item_mean(samples, match) for samples in by_item.values()]
    return {
        "accuracy": math.fsum(means) / len(means),
        "interval": accuracy_interval(means, num_samples),
        "right": sum(sample.right[match] for each in by_item.values() for sample in each),
    }


def _parts(
    samples: Sequence[Sample], num_samples: int, key: Callable[[Sample], str]
) -> dict[str, Part]:
    return {name: part(each, num_samples) for name, each in group(samples, key).items()}
