"""What a user hears when something is wrong: cause, evidence, way out."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 100
"""Of names that are compared with known ones: it takes time, and none that is longer is near."""


class TruelineError(Exception):
    """Every error a user can cause. `exit_code` follows the CLI's convention."""

    exit_code = 2


class ConfigError(TruelineError):
    """A config.json that we cannot resolve completely."""


class CheckpointError(TruelineError):
    """Weight files that are damaged, incomplete, or not what the config says."""


class UsageError(TruelineError):
    """A wrong argument from a caller or a command line."""


class PluginError(UsageError):
    """An installed package whose replacement does not fit."""


class RequestRejected(TruelineError):
    """A request that could never finish here. The engine lives on."""


def short(text: str, most: int = 60) -> str:
    """What somebody gave, for a message about it: a text of any length makes a line, not a book."""
    return text if len(text) <= most else text[: most - 3] + "..."


def short_repr(value: object) -> str:
    return short(repr(value))


class EngineBroken(TruelineError):
    """The engine cannot go on: what was asked of it is lost, and nothing more can be asked."""

    exit_code = 1


CANARY_HIT = "a cache canary was hit"
"""How such an error begins, on whatever rank: words are all that crosses processes."""


LONGEST = 1000
"""Characters of somebody else's error that a client gets; the log has all of them."""


def described(error: BaseException) -> str:
    """An error that is not ours, in one piece."""
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return short(words, LONGEST)


def nearest(name: str, known: Iterable[str]) -> str | None:
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known) if len(name) <= LONGEST_NAME else None
    return f"; the nearest known name is '{close}'" if close and close != name else ""
