"""The list of modules that a `quantization_config` exempts, for formats that have one."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeGuard

from trueline.spec.fields import Fields
from trueline.spec.source import Fact, default

SPELLINGS = ("modules_to_not_convert", "ignored_layers", "ignore")


def read_ignored_modules(
    section: Fields, spellings: tuple[str, ...] = SPELLINGS
) -> Fact[tuple[str, ...]]:
    present = [key for key in spellings if section.has(key)]
    if not present:
        return default((), "nothing is exempt by name")
    if len(present) > 1:
        section.refuse(present[1], f"only one of {', '.join(spellings)}")
    return section.list_of(
        present[0], _is_module_name, "module names, or 're:' and a regular expression", length=None
    )


def _is_module_name(value: object) -> TypeGuard[str]:
    if not isinstance(value, str) or not value:
        return False
    try:
        re.compile(value.removeprefix("re:"))
    except re.error:
        return not value.startswith("re:")
    return True


def is_ignored(modules: tuple[str, ...], weight: str) -> bool:
    """Whether a weight's module, or a module around it, is exempt. By its full name, or by the last
    parts of it as Ling's lists have them ('b_proj', '5.attention.g_proj'); never by a piece of a
    part: 'b_proj' does not exempt 'q_b_proj', 'mlp.gate' not 'mlp.gate_proj', nor 'layers.1'
    'layers.11'."""
    names, patterns = names_and_patterns(modules)
    parts = weight.split(".")[:-1]
    around = (".".join(parts[:end]) for end in range(1, len(parts)))
    last = (".".join(parts[start:]) for start in range(len(parts)))
    if any(name in names for name in (*around, *last)):
        return True
    return any(pattern.fullmatch(".".join(parts)) for pattern in patterns)


@lru_cache(maxsize=8)
def names_and_patterns(modules: tuple[str, ...]) -> tuple[frozenset[str], list[re.Pattern[str]]]:
    """Looked up, not gone through: GLM-5's list has 712 entries, and the model 58,000 weights."""
    names = frozenset(entry for entry in modules if not entry.startswith("re:"))
    return names, [re.compile(entry[3:]) for entry in modules if entry not in names]
