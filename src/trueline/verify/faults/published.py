"""Mistakes in numerics `published`: what is rounded, in which groups, with which scales, how."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trueline.cache.fp8 import in_groups, join, through_e4m3
from trueline.cache.index import IndexView
from trueline.cache.store import LatentView
from trueline.layers.compressed import Compressed, Compressor
from trueline.layers.entry_indexer import EntryIndexer
from trueline.ops.row_rounding import INDEX_GROUP, KEY_GROUP, composed
from trueline.verify.faults import Fault, Make

Rows = Callable[[Tensor], Tensor]


def _as_computed(write: Make) -> Make:
    """What these tokens add to the window is not rounded."""

    def broken(self: Compressed, *given: object) -> object:
        kept, self.rounded = self.rounded, None
        try:
            return write(self, *given)
        finally:
            self.rounded = kept

    return broken


def _made_as_computed(kind: type[LatentView | IndexView]) -> Make:
    """What compressors write to caches of a kind is not rounded."""

    def of(write: Make) -> Make:
        def broken(self: Compressor, *given: object) -> None:
            kept = self.rounded
            self.rounded = None if any(isinstance(each, kind) for each in given) else kept
            try:
                write(self, *given)
            finally:
                self.rounded = kept

        return broken

    return of


def _no_queries(choose: Make) -> Make:
    """Index queries are not rounded."""

    def broken(self: EntryIndexer, *given: object) -> object:
        kept, self.op.row_rounding = self.op.row_rounding, None
        try:
            return choose(self, *given)
        finally:
            self.op.row_rounding = kept

    return broken


def _keys_differ(changed: Callable[[Tensor, Tensor, int], Tensor]) -> Make:
    """`changed`: of the rows, of what they are rounded to, and of the channels that rotate."""

    def of(key: Make) -> Make:
        def broken(rows: Tensor, *, rope: int) -> Tensor:
            return changed(rows, key(rows, rope=rope), rope)

        return broken

    return of


def _rope_as_computed(rows: Tensor, made: Tensor, rope: int) -> Tensor:
    return torch.cat((made[:, :-rope], rows[:, -rope:]), dim=1)


def _rope_through_e4m3(rows: Tensor, made: Tensor, rope: int) -> Tensor:
    coded = through_e4m3(made[:, -rope:].float(), KEY_GROUP, power_of_two=True)
    return torch.cat((made[:, :-rope], coded.to(made.dtype)), dim=1)


def _not_through_bfloat16(rows: Tensor, made: Tensor, rope: int) -> Tensor:
    coded = through_e4m3(rows[:, :-rope].float(), KEY_GROUP, power_of_two=True)
    return torch.cat((coded.to(made.dtype), made[:, -rope:]), dim=1)


def _ties_away(nearest: Make) -> Make:
    """Numbers half-way between two codes go to the one farther from zero."""

    def broken(groups: Tensor) -> Tensor:
        return torch.as_tensor(nearest(groups * (1 + 2.0**-20)))

    return broken


def _keys_ties_away(through: Make) -> Make:
    def broken(x: Tensor, group: int, power_of_two: bool) -> Tensor:
        return torch.as_tensor(through(x * (1 + 2.0**-20), group, power_of_two))

    return broken


def _shared_scales(through: Make) -> Make:
    """All rows of a step, or of a head, have one scale for each group."""

    def broken(groups: Tensor) -> Tensor:
        if not len(groups):
            return groups
        together = groups.movedim(0, -2).flatten(-2)
        made = torch.as_tensor(through(together))
        apart = (*made.shape[:-1], len(groups), groups.shape[-1])
        return made.view(apart).movedim(-2, 0)

    return broken


def _nearest_power(_: Make) -> Rows:
    return lambda scales: scales.log2().round().exp2()


def _plain_scales(through: Make) -> Make:
    return lambda x, group, power_of_two: through(x, group, False)


def _unscaled(hadamard: Make) -> Make:
    return lambda x: hadamard(x) * x.shape[-1] ** 0.5


def _wide(before: bool) -> Make:
    """Index rows are not rounded to bfloat16: before the Hadamard matrix, or behind it."""

    def of(_: Make) -> Rows:
        def broken(rows: Tensor) -> Tensor:
            turned = composed._hadamard((rows if before else rows.bfloat16()).float())
            turned = turned.bfloat16().float() if before else turned
            groups = in_groups(turned, INDEX_GROUP)
            return join(composed._through_e2m1(groups), rows.shape[-1]).to(rows.dtype)

        return broken

    return of


OPS, ENGINE, CASE = "V4 op = reference", "published rounding", "v4-rounded"

PUBLISHED_FAULTS = [
    Fault("window-rows-as-computed", "rows of the window are not rounded", ENGINE, CASE,
          Compressed, "_write", _as_computed),
    Fault("entries-as-computed", "compressed entries are not rounded", ENGINE, CASE,
          Compressor, "write", _made_as_computed(LatentView)),
    Fault("rope-rounded-too", "channels that rotate go through e4m3 too", ENGINE, CASE,
          composed, "key", _keys_differ(_rope_through_e4m3)),
    Fault("rope-as-computed", "channels that rotate are not rounded to bfloat16", ENGINE, CASE,
          composed, "key", _keys_differ(_rope_as_computed)),
    Fault("keys-not-bfloat16-first", "from float32 straight to e4m3", ENGINE, CASE,
          composed, "key", _keys_differ(_not_through_bfloat16)),
    Fault("keys-plain-scales", "scales of keys are no powers of two", ENGINE, CASE,
          composed, "through_e4m3", _plain_scales),
    Fault("keys-ties-away", "ties of e4m3 away from zero", ENGINE, CASE,
          composed, "through_e4m3", _keys_ties_away),
    Fault("keys-groups-of-128", "keys in groups of 128 channels, as activations are", OPS, CASE,
          composed, "KEY_GROUP", lambda size: 2 * size),
    Fault("index-queries-as-computed", "index queries are not rounded", ENGINE, CASE,
          EntryIndexer, "choose", _no_queries),
    Fault("index-keys-as-computed", "index keys are not rounded", ENGINE, CASE,
          Compressor, "write", _made_as_computed(IndexView)),
    Fault("hadamard-missing", "index rows meet no Hadamard matrix", ENGINE, CASE,
          composed, "_hadamard", lambda _: lambda x: x),
    Fault("hadamard-unscaled", "the Hadamard matrix is not over the root of its size", ENGINE,
          CASE, composed, "_hadamard", _unscaled),
    Fault("index-not-bfloat16-before", "index rows meet the matrix in float32", ENGINE, CASE,
          composed, "index", _wide(before=True)),
    Fault("index-not-bfloat16-behind", "from the matrix straight to e2m1", ENGINE, CASE,
          composed, "index", _wide(before=False)),
    Fault("index-nearest-power", "scales of e2m1 to the nearest power of two", ENGINE, CASE,
          composed, "power_of_two_above", _nearest_power),
    Fault("index-plain-scales", "scales of e2m1 are no powers of two", ENGINE, CASE,
          composed, "power_of_two_above", lambda _: lambda scales: scales),
    Fault("index-ties-away", "ties of e2m1 away from zero (vllm#41015)", ENGINE, CASE,
          composed, "_through_e2m1", _ties_away),
    Fault("index-scales-of-the-step", "index rows of a step share their scales",
          "published rounding, bitwise", CASE, composed, "_through_e2m1", _shared_scales),
    Fault("index-groups-of-64", "index rows in groups of 64 channels", OPS, CASE,
          composed, "INDEX_GROUP", lambda size: 2 * size),
]  # fmt: skip
