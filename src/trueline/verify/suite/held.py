"""What an engine keeps of each position where its caches round it, and the definition over just
that: two computations of one row may differ in the last bit, and so by a whole code, which every
position behind it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trueline.cache.kinds.entries import EntriesIndex
from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.window import Window
from trueline.cache.layout import LatentLayout
from trueline.ops.capabilities import PUBLISHED
from trueline.plan.plan import Plan
from trueline.reference import published
from trueline.reference.functional import Params
from trueline.verify import rounding
from trueline.verify.latent_rows import CachedLatents, latents_are
from trueline.verify.rounded_rows import KINDS, Kind, RoundedRows, right_rows, rows_are

Rows = dict[str, dict[int, Tensor]]
"""Of a layer: by kind and by the position at which a row is complete."""


class Own(NamedTuple):
    """Rows of the definition, before they are rounded, beside those held."""

    kind: str
    held: Tensor
    own: Tensor
    rotated: int


@dataclass(frozen=True)
class Rounded:
    """How a plan's caches round what is attended to."""

    latents: LatentLayout | None = None
    """Of one latent a position, in fp8."""
    kinds: tuple[Kind, ...] = ()
    """Of DeepSeek V4, as its layers ask for them."""
    by_name: bool = False
    """Numerics `published`."""
    ratios: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> Rounded | None:
        """None where rows are kept as they are computed."""
        kind = plan.kind(Latent)
        if kind is not None:
            return Rounded(kind.layout) if kind.layout.fp8 else None
        found = [kind for kind in plan.kinds if isinstance(kind, KINDS)]
        by_name = plan.numerics.name == PUBLISHED
        in_fp8 = [not isinstance(k, EntriesIndex) and bool(k.layout.fp8) for k in found]
        if not by_name and not any(in_fp8):
            return None
        kinds = tuple(sorted(found, key=lambda kind: KINDS.index(type(kind))))
        ratios = {k.name: 1 if isinstance(k, Window) else k.ratio for k in kinds}
        return Rounded(None, kinds, by_name, ratios)

    @contextmanager
    def attended(self, layer: int, held: Mapping[str, Tensor]) -> Iterator[list[Own]]:
        """Meanwhile this layer of the definition attends to the rows held, by kind. The list gets
        its own as it asks for them."""
        found: list[Own] = []
        if not held:
            yield found
        elif self.latents is not None:
            with self._latents(held[Latent.name], found):
                yield found
        else:
            with self._compressed(layer, held, found):
                yield found

    @contextmanager
    def _latents(self, rows: Tensor, found: list[Own]) -> Iterator[None]:
        assert self.latents is not None

        def kept(layer: int, own: Tensor) -> Tensor:
            found.append(Own(Latent.name, rows, own, self.latents.rope))  # type: ignore[union-attr]
            return rows.to(own.dtype)

        with latents_are(self.latents.latent, kept):
            yield

    @contextmanager
    def _compressed(
        self, layer: int, held: Mapping[str, Tensor], found: list[Own]
    ) -> Iterator[None]:
        names = iter([
            kind.name for kind in self.kinds
            if layer in kind.layers and not isinstance(kind, EntriesIndex)
        ])  # fmt: skip
        own_row = published.index_row

        def stored(name: str, row: Tensor, rotated: int) -> Tensor:
            if not len(row):  # no entry is complete yet
                return row
            found.append(Own(name, held[name], row, rotated))
            return held[name].to(row.dtype)

        def stored_key(params: Params, row: Tensor, rotated: int) -> Tensor:
            return stored(next(names), row, rotated)

        def index_row(params: Params, row: Tensor) -> Tensor:
            """Queries are the definition's own."""
            if row.dim() == 3 or not self.by_name:
                return own_row(params, row)
            return stored(EntriesIndex.name, row, 0)

        with rows_are(stored_key, index_row):
            yield

    def wrong(self, rows: Own, accepted: float, count: int) -> Tensor:
        """[count]: at the positions where rows are complete, infinite where one is not what the
        definition's rounds to, up to an error of so much of its largest number."""
        kind, held, own, rotated = rows
        made = torch.zeros(count, dtype=torch.float64, device=own.device)
        if len(own):
            off = accepted * own.abs().amax(1, keepdim=True)
            right = self._right(kind, held.to(own.dtype), own, off, rotated)
            step = self.ratios.get(kind, 1)
            at = torch.arange(1, len(own) + 1, device=own.device) * step - 1
            made[at] = torch.zeros_like(made[at]).masked_fill(~right, torch.inf)
        return made

    def _right(self, kind: str, held: Tensor, own: Tensor, off: Tensor, rotated: int) -> Tensor:
        if self.latents is not None:
            return rounding.fp8_rows_of(held, own, off, self.latents)
        if kind == EntriesIndex.name:
            return rounding.index_rows_of(held, own, off)
        whose = None if self.by_name else next(k for k in self.kinds if k.name == kind)
        return right_rows(whose, held, own, off, rotated)


def noise(rough: Own, exact: Own) -> float:
    """The largest error of a number, relative to its row's largest."""
    if not len(exact.own):
        return 0.0
    size = exact.own.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return float(((rough.own.double() - exact.own.double()).abs() / size).max())


def rows_by_layer(stored: CachedLatents | RoundedRows) -> dict[int, Rows]:
    made: dict[int, Rows] = {}
    if isinstance(stored, CachedLatents):
        for layer, rows in stored.rows.items():
            made[layer] = {Latent.name: dict(rows)}
        return made
    ratios = {k.name: 1 if isinstance(k, Window) else k.ratio for k in stored.kinds}
    for (name, layer), rows in stored.rows.items():
        step = ratios[name]
        made.setdefault(layer, {})[name] = {
            (number + 1) * step - 1: row for number, row in rows.items()
        }
    return made
