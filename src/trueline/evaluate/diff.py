"""Two results of the same items, compared pair by pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from trueline.errors import UsageError, did_you_mean
from trueline.evaluate.figures import group, item_mean
from trueline.evaluate.samples import FILE as SAMPLES
from trueline.evaluate.samples import Sample, latest, read_samples
from trueline.evaluate.statistics import difference_interval, mcnemar


class PairFigures(TypedDict):
    """With several samples an item, "only A" are items that A has right more often; where both
    have it right equally often, "both" from one half up."""

    items: int
    both: int
    only_a: int
    only_b: int
    neither: int
    accuracy_a: float
    accuracy_b: float
    difference: float
    """B less A."""
    interval: tuple[float, float]
    """95 %, of the difference."""
    p: float
    """McNemar's exact test: two-sided, on the items that only one side has right."""


class Differing(TypedDict):
    """A sample whose right or text is not the same on both sides."""

    item: str
    sample: int
    category: str
    answer: str
    right_a: bool
    right_b: bool
    text_a: str
    text_b: str


class DiffFigures(PairFigures):
    match: str
    errors_a: int
    errors_b: int
    samples: int
    texts_differ: int
    """Samples whose output text differs."""
    categories: dict[str, PairFigures]
    differing: list[Differing]
    """The first ones: those that are right on one side only come before others."""


def load(path: Path) -> list[Sample]:
    """A results directory, or its samples.jsonl."""
    file = path / SAMPLES if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path}: accepted: a directory that has a {SAMPLES}, or such a file")
    samples, _ = read_samples(file)
    if not samples:
        raise UsageError(f"{file}: no samples")
    return list(latest(samples).values())


def diff(
    a: Sequence[Sample], b: Sequence[Sample], match: str | None = None, show: int = 5
) -> DiffFigures:
    """`match`: the first one that both have, unless given."""
    by_key = {sample.key: sample for sample in b}
    _check_same_items(a, by_key)
    pairs = [(sample, by_key[sample.key]) for sample in a]
    used = _pick_match(a[0], b[0], match)
    by_category = group(a, lambda sample: sample.category)
    differing = [pair for pair in pairs if _differ(pair, used)]
    differing.sort(key=lambda pair: pair[0].right[used] == pair[1].right[used])
    return {
        "match": used,
        **_pair_figures(a, by_key, used),
        "errors_a": sum(sample.error is not None for sample in a),
        "errors_b": sum(sample.error is not None for sample in b),
        "samples": len(pairs),
        "texts_differ": sum(one.text != other.text for one, other in pairs),
        "categories": {
            name: _pair_figures(samples, by_key, used)
            for name, samples in by_category.items()
            if name
        },
        "differing": [_shown(pair, used) for pair in differing[:show]],
    }


def _check_same_items(a: Sequence[Sample], b: Mapping[tuple[str, int], Sample]) -> None:
    keys = {sample.key for sample in a}
    missing_a, missing_b = len(b.keys() - keys), len(keys - b.keys())
    if missing_a or missing_b:
        raise UsageError(
            f"not the same items: {missing_a} samples are missing in A, {missing_b} in B; "
            "accepted: two complete evaluations of the same items"
        )
    other = sum(sample.answer != b[sample.key].answer for sample in a)
    if other:
        raise UsageError(f"not the same items: {other} have another answer in A than in B")


def _pick_match(a: Sample, b: Sample, wanted: str | None) -> str:
    common = [name for name in a.right if name in b.right]
    if not common:
        raise UsageError(f"no match in common: A has {', '.join(a.right)}, B {', '.join(b.right)}")
    if wanted is not None and wanted not in common:
        raise UsageError(
            f"--match {wanted}: accepted: {', '.join(common)}{did_you_mean(wanted, common)}"
        )
    return wanted or common[0]


def _pair_figures(
    a: Sequence[Sample], b: Mapping[tuple[str, int], Sample], match: str
) -> PairFigures:
    means = [
        (item_mean(samples, match), item_mean([b[sample.key] for sample in samples], match))
        for samples in group(a, lambda sample: sample.item).values()
    ]
    count = len(means)
    only_a = sum(one > other for one, other in means)
    only_b = sum(other > one for one, other in means)
    both = sum(one == other and one >= 0.5 for one, other in means)
    accuracy_a = math.fsum(one for one, _ in means) / count
    accuracy_b = math.fsum(other for _, other in means) / count
    return {
        "items": count,
        "both": both,
        "only_a": only_a,
        "only_b": only_b,
        "neither": count - both - only_a - only_b,
        "accuracy_a": accuracy_a,
        "accuracy_b": accuracy_b,
        "difference": accuracy_b - accuracy_a,
        "interval": difference_interval([other - one for one, other in means]),
        "p": mcnemar(only_a, only_b),
    }


def _differ(pair: tuple[Sample, Sample], match: str) -> bool:
    a, b = pair
    return a.text != b.text or a.right[match] != b.right[match]


def _shown(pair: tuple[Sample, Sample], match: str) -> Differing:
    a, b = pair
    return {
        "item": a.item,
        "sample": a.sample,
        "category": a.category,
        "answer": a.answer,
        "right_a": a.right[match],
        "right_b": b.right[match],
        "text_a": a.error or a.text,
        "text_b": b.error or b.text,
    }
