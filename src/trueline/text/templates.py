"""Jinja as Hugging Face transformers has it, which chat templates are written for, in a sandbox.

The sandbox keeps a template from what is not its own. It bounds neither time nor memory: an
untrusted template goes to `template_process`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trueline.errors import UsageError


def render_template(template: str, values: Mapping[str, object]) -> str:
    try:
        return _compiled(template).render(values)
    except TemplateSyntaxError as error:
        raise UsageError(f"chat template, line {error.lineno}: {error.message}") from error
    except SecurityError as error:
        raise UsageError(f"chat template does what it must not: {error}") from error
    except _Refused as error:
        raise UsageError(f"chat template refuses these messages: {error.message}") from error
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything that an expression can
        raise UsageError(f"chat template failed: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=64)
def names_read(template: str) -> frozenset[str]:
    """What the template reads of what it is given; nothing where it is none: rendering says why."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except TemplateSyntaxError:
        return frozenset()


class _Refused(TemplateError):
    """The template called raise_exception: its author's words for its user."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


class _Namespace(Namespace):
    """Jinja's, without names that reach Python's own attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute '{name}' begins with an underscore")
        super().__setitem__(name, value)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Not the class: dict.update(…) would change what the sandbox holds unchangeable."""
    return dict(*args, **kwargs)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would write < as \\u003c, for the web."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Generation(Extension):
    """{% generation %} marks what an assistant said, for training. Its body has a scope of its
    own, as there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _make_dict
    return environment


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)
