"""config.json as it is, before the reference reads it."""

from typing import Any

from trueline.errors import ConfigError


class Raw(dict[str, Any]):
    """A section of config.json in which a missing required key says its name."""

    def __missing__(self, key: str) -> object:
        raise ConfigError(f"config.json: '{key}' is missing, and the reference has no default")
