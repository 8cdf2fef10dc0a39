"""The arguments of an encoding: what a template would have in its own text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trueline.errors import UsageError, short, short_repr

SWITCHES = ("thinking", "enable_thinking")
EFFORT = "reasoning_effort"
NO_EFFORT = "none"
"""No thinking, by the name that clients have for it."""


def known(
    arguments: Mapping[str, object], accepted: Sequence[str], title: str
) -> dict[str, object]:
    """Those that are given."""
    for name in arguments:
        if name not in accepted:
            raise wrong(name, f"not known to {title}'s encoding", ", ".join(accepted))
    return {name: value for name, value in arguments.items() if value is not None}


def thinking_said(given: Mapping[str, object]) -> bool | None:
    """By any of the names that there are for it."""
    said = {value for name in SWITCHES if (value := flag(given, name)) is not None}
    said |= {False} if given.get(EFFORT) == NO_EFFORT else set()
    if len(said) > 1:
        names = [name for name in (*SWITCHES, EFFORT) if name in given]
        raise wrong(names[0], f"{short_repr(given[names[0]])} contradicts the other",
                    f"what {' and '.join(names[1:])} says")  # fmt: skip
    return said.pop() if said else None


def choice(given: Mapping[str, object], name: str, accepted: Iterable[str]) -> str:
    value, names = given[name], list(accepted)
    if isinstance(value, str) and value in names:
        return value
    raise wrong(name, short_repr(value), ", ".join(names))


def flag(given: Mapping[str, object], name: str) -> bool | None:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise wrong(name, short_repr(value), "true or false")


def wrong(name: str, found: str, accepted: str) -> UsageError:
    return UsageError(f"chat_template_kwargs.{short(name)}: {found}; accepted: {accepted}")
