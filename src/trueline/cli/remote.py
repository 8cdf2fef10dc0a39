"""Options that the verbs which talk to a server share: address, API key, sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trueline.errors import UsageError
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.client.endpoint import Endpoint

ADDRESS = re.compile(r"https?://.*|[\w.-]+:\d+(/.*)?")
"""Of a server, where a model may be given as well."""
KEY_VARIABLES = ["TRUELINE_API_KEY", "OPENAI_API_KEY"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    model: str | None = None
    """Default: the only one the server has; of chat without URL, the model to serve."""
    api_key: Annotated[str | None, Parameter(env_var=KEY_VARIABLES)] = None
    """Better in the environment or in a file: others can read a command line."""
    api_key_file: Path | None = None
    """Its first line is the key."""
    timeout: float = 600.0
    """Seconds to wait for the next byte; of a benchmark or an evaluation, for a whole
    answer."""

    def open(self, url: str) -> Endpoint:
        from trueline.client.endpoint import endpoint

        return endpoint(url, self._key(), self.timeout)

    def _key(self) -> str | None:
        if self.api_key_file is None:
            key = self.api_key
        else:
            try:
                key = self.api_key_file.read_text().partition("\n")[0].strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"--api-key-file {self.api_key_file}: not readable ({error})"
                ) from error
            if not key:
                raise UsageError(f"--api-key-file {self.api_key_file}: no key on its first line")
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError("the API key has characters that no header can carry")
        return key


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Only what is given is sent; the rest is the server's choice."""

    temperature: float | None = None
    """0 takes the likeliest token every time."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """Makes the draws repeatable, where the server can."""
    stop: tuple[str, ...] = ()
    """End the answer at this text. May be given several times."""
    ignore_eos: Annotated[bool, Parameter(negative=())] = False
    """Go on past the model's own end."""
    field: tuple[str, ...] = ()
    """Any other field of the request, as NAME=VALUE; VALUE is JSON or text. May be given
    several times."""

    def body(self) -> JSON:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        extra = parse_fields("--field", given.pop("field"))
        body = {n: v for n, v in given.items() if v is not None and v is not False and v != ()}
        return body | extra


def parse_fields(option: str, texts: Iterable[str]) -> JSON:
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise UsageError(f"{option} {text}: accepted: NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
