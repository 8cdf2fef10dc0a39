"""Arguments that several verbs take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from trueline.errors import UsageError


def parse_facts(texts: Iterable[str]) -> dict[str, float]:
    """--fact NAME=VALUE, for facts that published sources contradict each other on."""
    return dict(_parse_fact(text) for text in texts)


def _parse_fact(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise UsageError(f"--fact {text}: accepted: NAME=NUMBER, as latent_norm_eps=1e-5")
    return name, number
