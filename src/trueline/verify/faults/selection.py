"""Mistakes with selected positions, in the running engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.cache.kinds.index_keys import IndexInput, IndexKeys
from trueline.cache.rows import BatchRow
from trueline.layers.context import StepInput
from trueline.layers.indexer import Indexer
from trueline.layers.mla import MLA
from trueline.spec.rope import Pairing
from trueline.verify.faults import Fault, Make, Running


def _first_positions(choose: Make) -> Make:
    """The choice is not looked at: the first positions are taken."""

    def broken(self: Indexer, *arguments: object) -> Tensor:
        chosen: Tensor = choose(self, *arguments)
        return torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()

    return broken


def _everything_is_seen(num_seeing: Make) -> Make:
    """Rows that should choose attend to all they have."""
    return lambda self, most: num_seeing(self, None)


def _keys_of_long_rows_only(select: Make) -> Make:
    """Steps that choose nothing leave no keys behind."""

    def broken(
        self: MLA, indexer: object, x: object, made: object, step: StepInput, *rest: object
    ) -> None:
        if step[IndexKeys].count:
            select(self, indexer, x, made, step, *rest)

    return broken


def _last_dims_rotated(rotate: Make) -> Make:
    def broken(x: Tensor, *how: object) -> Tensor:
        rotated: Tensor = rotate(x.flip(-1), *how)
        return rotated.flip(-1)

    return broken


def _other_pairing(init: Make) -> Make:
    def broken(self: Indexer, *arguments: object) -> None:
        init(self, *arguments)
        other: Pairing = "half-split" if self.spec.rope.pairing == "interleaved" else "interleaved"
        self.spec = replace(self.spec, rope=replace(self.spec.rope, pairing=other))

    return broken


def _no_bias(init: Make) -> Make:
    def broken(self: Indexer, *arguments: object) -> None:
        init(self, *arguments)
        self.norm = self.norm[0], torch.zeros_like(self.norm[1])

    return broken


def _in_place_assumed(*, keys: bool) -> Make:
    """What the rotation of keys, or of queries, returns is dropped, as if it had rotated its
    argument."""

    def make(rotate: Make) -> Make:
        def broken(x: Tensor, *how: object) -> Tensor:
            rotated: Tensor = rotate(x, *how)
            return x if (x.shape[1] == 1) == keys else rotated

        return broken

    return make


def _rows_from_the_front(select: Make) -> Make:
    """One counter for queries and keys: the first rows of the step choose for the others."""

    def broken(
        self: Indexer, x: object, q_latent: object, rope: object, step: IndexInput, view: object
    ) -> Tensor:
        front = replace(step, at=torch.arange(step.count))
        chosen: Tensor = select(self, x, q_latent, rope, front, view)
        return chosen

    return broken


def _forgets_to_share(attend: Make) -> Make:
    """A layer without an indexer sees the latest positions instead of the chosen ones."""

    def broken(self: MLA, q: object, rows: object, view: object, chosen: Tensor) -> Tensor:
        if self.indexer is None:
            chosen = (chosen.amax(1, keepdim=True) - torch.arange(chosen.shape[1])).clamp_min(0)
        out: Tensor = attend(self, q, rows, view, chosen)
        return out

    return broken


_V, _WRITE = "v32-near", Running("index_write")

SELECTION_FAULTS = [
    Fault("engine-selection-ignored", "the choice is not looked at", "engine oracle", _V,
          Indexer, "choose", _first_positions),
    Fault("engine-sees-everything", "rows attend to all they have", "engine oracle", _V,
          BatchRow, "num_seeing", _everything_is_seen),
    Fault("engine-keys-of-long-rows", "short steps write no index keys", "split = whole", _V,
          MLA, "_select", _keys_of_long_rows_only),
    Fault("engine-index-last-dims", "the indexer rotates the last dims", "engine oracle", _V,
          _WRITE, "rotate_first", _last_dims_rotated),
    Fault("engine-index-pairing", "V3.2's indexer rotates interleaved channels", "engine oracle",
          _V, Indexer, "__init__", _other_pairing),
    Fault("engine-index-pairing-glm", "GLM-5's indexer rotates half-split channels",
          "engine oracle", "glm5", Indexer, "__init__", _other_pairing),
    Fault("engine-key-norm-bias", "the bias of the key norm is dropped", "engine oracle", _V,
          Indexer, "__init__", _no_bias),
    Fault("engine-rope-in-place-q", "index queries rely on rotation in place (story 4)",
          "engine oracle", _V, _WRITE, "rotate_first", _in_place_assumed(keys=False)),
    Fault("engine-rope-in-place-k", "index keys rely on rotation in place (story 4)",
          "engine oracle", _V, _WRITE, "rotate_first", _in_place_assumed(keys=True)),
    Fault("engine-one-counter", "queries counted as keys in mixed steps", "solo = batch", _V,
          Indexer, "choose", _rows_from_the_front),
    Fault("engine-shared-forgets", "a shared layer does not see the chosen positions",
          "engine oracle", "glm5", MLA, "_attend_selected", _forgets_to_share),
]  # fmt: skip
