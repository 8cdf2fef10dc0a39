"""What a seeded fault is; the modules beside this one hold the faults, by what they break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trueline.ops.registry import implementation, runnable
from trueline.spec.source import Fact, Spec

Make = Callable[..., Any]
"""From the original attribute to its broken replacement; or such a replacement."""


@dataclass(frozen=True)
class Running:
    """The implementation of an op that an engine takes on this machine."""

    op: str

    def module(self) -> object:
        return implementation(self.op, runnable(self.op, torch.float32)[0])


@dataclass(frozen=True)
class Fault:
    id: str
    what: str
    check: str
    case: str
    owner: object
    attribute: str
    broken: Make

    def place(self) -> object:
        """The module or class whose attribute is replaced."""
        return self.owner.module() if isinstance(self.owner, Running) else self.owner

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """The package as it would be with this mistake in it."""
        owner = self.place()
        original = vars(owner)[self.attribute]
        setattr(owner, self.attribute, self.broken(original))
        try:
            yield
        finally:
            setattr(owner, self.attribute, original)


class Rewriting:
    """A spec class, but some facts come out wrong."""

    def __init__(self, spec: type[Spec], **wrong: Fact[object]) -> None:
        self._spec, self._wrong = spec, wrong

    def of(self, **facts: object) -> Spec:
        return self._spec.of(**facts | self._wrong)
