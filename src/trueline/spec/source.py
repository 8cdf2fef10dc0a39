"""Where a fact comes from. Every resolved value carries its source, so `inspect` can show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Generic, Literal, Self, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SourceKind = Literal["key", "default", "formula", "override"]


@dataclass(frozen=True, slots=True)
class Source:
    """`key`: read from the file; `default`: the family's documented value, the key being absent;
    `formula`: follows from other facts; `override`: the user said so."""

    kind: SourceKind
    text: str


@dataclass(frozen=True, slots=True)
class Fact(Generic[T_co]):
    value: T_co
    source: Source


def formula(value: T, text: str) -> Fact[T]:
    return Fact(value, Source("formula", text))


def default(value: T, text: str) -> Fact[T]:
    return Fact(value, Source("default", text))


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a divided dimension that one rank holds: rows start..stop of total."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Span:
        return cls(0, total, total)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here: one rank's, or replicated."""
        return self.count == self.total

    def __str__(self) -> str:
        if self.is_whole:
            return str(self.total)
        return f"{self.count} of {self.total} ({self.start}:{self.stop})"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Frozen facts. `sources` names, for each field, where its value comes from."""

    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)

    # Facts that follow from the fields: property name -> formula, as shown by `inspect`.
    DERIVED: ClassVar[Mapping[str, str]] = {}
    # Fields that differ between layers of one kind.
    PLACE: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(cls, **values: object) -> Self:
        """Build from facts; a plain value or a nested spec is taken as it is."""
        plain = {k: v.value if isinstance(v, Fact) else v for k, v in values.items()}
        sources = {k: v.source for k, v in values.items() if isinstance(v, Fact)}
        return cls(**plain, sources=sources)

    def same_kind(self, other: Spec) -> bool:
        """Equal, wherever in the model the two stand."""
        return type(self) is type(other) and all(
            getattr(self, item.name) == getattr(other, item.name)
            for item in fields(self)
            if item.compare and item.name not in self.PLACE
        )

    def facts(self) -> Iterator[tuple[str, object, Source]]:
        """Every fact of this spec that is not itself a spec, with its source."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in self.sources and not isinstance(value, Spec):
                yield item.name, value, self.sources[item.name]
        for name, text in self.DERIVED.items():
            yield name, getattr(self, name), Source("formula", text)
