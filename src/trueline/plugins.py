"""What can be chosen by name: ours, and what installed packages add through entry points.

A package names its objects KIND.NAME in one of the groups `trueline.ops`, `trueline.layers`,
`trueline.models`, `trueline.kinds` and `trueline.formats`. Entry points are read once, and a KIND
that does not exist is an error. Their code is imported when it is needed, and must state the
`api_version` it was written for. docs/plugins.md has the contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from trueline.errors import PluginError, UsageError, did_you_mean

API_VERSION = 5
"""Of the contracts; raised whenever an object written for the old ones would no longer do."""


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda entry: (entry.name, package(entry))))


def package(entry: EntryPoint) -> str:
    """Name and version of whoever declares it."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "trueline itself"


def lacking(found: object, functions: Sequence[str]) -> str | None:
    """The complaint about an object that has not all of them."""
    missing = [name for name in functions if not callable(getattr(found, name, None))]
    return f"lacks {', '.join(missing)}; needed: {', '.join(functions)}" if missing else None


class Registry:
    """All objects of one group. `own` has ours as KIND.NAME -> where to import it from, `needs` the
    functions that an object of each kind has; `unfit` says what else is wrong with a package's
    object of a kind, if anything."""

    def __init__(
        self,
        group: str,
        noun: str,
        own: Mapping[str, str],
        needs: Mapping[str, Sequence[str]],
        unfit: Callable[[str, object], str | None] = lambda kind, found: None,
    ) -> None:
        self.group, self.noun, self.needs, self.unfit = group, noun, needs, unfit
        self.own = {key: EntryPoint(key, target, group) for key, target in own.items()}

    def names(self, kind: str) -> list[str]:
        """Ours in the order they were given, then those of packages."""
        if kind not in self.needs:
            raise UsageError(
                f"{self.noun} '{kind}': accepted: {', '.join(self.needs)}"
                f"{did_you_mean(kind, self.needs)}"
            )
        keys = (key.partition(".") for key in self._entries())
        return [name for each, _, name in keys if each == kind]

    def check_name(self, kind: str, name: str) -> None:
        known = self.names(kind)
        if name not in known:
            raise UsageError(
                f"{self.noun} '{kind}' has no implementation '{name}'; accepted: "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )

    def package(self, kind: str, name: str) -> str | None:
        """Which package an object comes from, None if it is ours or nobody's."""
        entry = self._entries().get(f"{kind}.{name}")
        return package(entry) if entry and entry.dist else None

    def get(self, kind: str, name: str) -> Any:
        entries = self._entries()
        key = f"{kind}.{name}"
        if key not in entries:
            self.check_name(kind, name)  # says what is accepted
        entry = entries[key]
        return self._checked(kind, entry) if entry.dist else entry.load()

    def _checked(self, kind: str, entry: EntryPoint) -> object:
        what = f"{package(entry)}: {self.group} '{entry.name}'"
        try:
            found = entry.load()
        except Exception as error:
            raise PluginError(f"{what} cannot be imported ({entry.value}): {error!r}") from error
        version = getattr(found, "api_version", None)
        if version != API_VERSION:
            raise PluginError(
                f"{what} states api_version {version}, this Trueline has {API_VERSION}"
            )
        wrong = lacking(found, self.needs[kind]) or self.unfit(kind, found)
        if wrong:
            raise PluginError(f"{what} {wrong}")
        return found

    def _entries(self) -> dict[str, EntryPoint]:
        found = dict(self.own)
        for entry in installed(self.group):
            kind, _, name = entry.name.partition(".")
            if kind not in self.needs or not name:
                raise PluginError(
                    f"{package(entry)}: entry point '{entry.name}' of {self.group}: accepted: "
                    f"KIND.NAME with a kind of {', '.join(self.needs)}"
                    f"{did_you_mean(kind, self.needs)}"
                )
            if entry.name in found:
                raise PluginError(
                    f"{self.group} '{entry.name}' is claimed by {package(found[entry.name])} and "
                    f"by {package(entry)}: rename or uninstall one of the two"
                )
            found[entry.name] = entry
        return found
