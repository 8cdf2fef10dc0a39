"""Arguments that several verbs take."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from cyclopts import Parameter

from trueline.errors import UsageError
from trueline.utils.builtin import BUILTIN_MODELS, DEFAULT_MODEL

ANY_TEXT = Parameter(allow_leading_hyphen=True)
"""Of an option whose value may begin with a hyphen, as - for stdin does."""


def model_or_default(model: str | None) -> str:
    """The model given, or the built-in default, which is told on stderr."""
    if model is not None:
        return model
    stands_for = BUILTIN_MODELS[DEFAULT_MODEL].stands_for
    print(f"no model given: the built-in {DEFAULT_MODEL}, {stands_for}", file=sys.stderr)
    return DEFAULT_MODEL


def parse_facts(texts: Iterable[str]) -> dict[str, float | str]:
    """--fact NAME=VALUE, for facts that published sources contradict each other on."""
    return dict(_parse_fact(text) for text in texts)


def parse_choices(option: str, texts: Iterable[str]) -> dict[str, str]:
    """--op and --layer, as KIND=NAME."""
    return dict(_parse_choice(option, text) for text in texts)


def _parse_choice(option: str, text: str) -> tuple[str, str]:
    kind, _, name = text.partition("=")
    if not kind or not name:
        raise UsageError(f"{option} {text}: accepted: KIND=NAME, as linear=torch_mm")
    return kind, name


def _parse_fact(text: str) -> tuple[str, float | str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(f"--fact {text}: accepted: NAME=VALUE, as latent_norm_eps=1e-5")
    try:
        number = float(value)
    except ValueError:
        return name, value
    return name, number if math.isfinite(number) else value
