"""Whole numbers with a suffix: 32K is 32,768 and 32k is 32,000, as vLLM reads them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, get_args

from trueline.errors import UsageError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

WITH_SUFFIX = re.compile(r"(?!0[xX])(\d+(?:\.\d+)?)([A-Za-z]+)")
SUFFIXES = {
    letter: base**power
    for power, pair in enumerate(("kK", "mM", "gG", "tT"), 1)
    for letter, base in zip(pair, (1000, 1024), strict=True)
}


def expand_counts(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Of every option that takes whole numbers, wherever its value comes from."""
    for argument in arguments:
        kinds = _kinds(argument.hint)
        if int not in kinds or str in kinds:
            continue
        argument.tokens[:] = [
            token.evolve(value=_expanded(token.keyword or argument.name, token.value))
            for token in argument.tokens
        ]


def _kinds(hint: object) -> set[object]:
    """The types that an annotation names, inside unions and tuples too."""
    inner = [kind for part in get_args(hint) for kind in _kinds(part)]
    return {hint, *inner} if isinstance(hint, type) else set(inner)


def _expanded(option: str, text: str) -> str:
    found = WITH_SUFFIX.fullmatch(text)
    if found is None:
        return text
    number = Decimal(found[1]) * SUFFIXES.get(found[2], 0)
    if found[2] not in SUFFIXES or number != int(number):
        raise UsageError(
            f"{option} {text}: accepted: a whole number, also as 32K (32,768) or 32k (32,000), "
            "with K, M, G, T or k, m, g, t"
        )
    return str(int(number))
