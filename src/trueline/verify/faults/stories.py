"""Mistakes of the five stories in the running engine, in forms that act on every device: what a
layer gets or returns is changed, not a kernel. `trueline witness` shows what they cost."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.cache.index import IndexView
from trueline.layers import ropes
from trueline.layers.indexer import Indexer
from trueline.layers.mla import MLA
from trueline.layers.ropes import Rope
from trueline.spec.rope import RopeSpec
from trueline.verify.faults import Fault, Make
from trueline.verify.faults.index_cache import as_layout

Table = tuple[Tensor, Tensor]
"""cos and sin, [positions, dim / 2]."""


def _first_half(made: Table, half: int) -> Table:
    """Of interleaved channels, those after the first `half` pairs stay as they are."""
    cos, sin = made[0].clone(), made[1].clone()
    cos[:, half:], sin[:, half:] = 1.0, 0.0
    return cos, sin


def _half_rotates(*, rebuilt: bool) -> Make:
    """Latent layers rotate half of their channels: by a table made for so many, or by the first
    frequencies of the whole one."""

    def make(table: Make) -> Make:
        def broken(rope: RopeSpec, positions: Tensor) -> Table:
            made: Table = table(rope, positions)
            if rope.pairing != "interleaved":  # that of linear layers
                return made
            half = made[0].shape[1] // 2
            if rebuilt:
                short = table(replace(rope, dim=2 * half), positions)
                made = tuple(  # type: ignore[assignment]
                    torch.cat((x, y[:, half:]), 1) for x, y in zip(short, made, strict=True)
                )
            return _first_half(made, half)

        return broken

    return make


def _index_rope(*, times: int) -> Make:
    """Index queries and keys are rotated so many times instead of once: a caller that drops the
    rotated result, or one that rotates what was rotated in place already."""

    def make(select: Make) -> Make:
        def broken(self: MLA, *given: object) -> None:
            *before, rope = given
            select(self, *before, _turned(rope, times))  # type: ignore[arg-type]

        return broken

    return make


def _turned(rope: Rope, times: int) -> Rope:
    """The table of a rotation that is done 0 or 2 times."""
    assert rope is not None
    cos, sin = rope
    if times == 0:
        return torch.ones_like(cos), torch.zeros_like(sin)
    return cos * cos - sin * sin, 2 * cos * sin


def _read_shuffled(choose: Make) -> Make:
    """Scores read index keys as shuffled, whatever the block size and the writer's layout. At block
    size 1 that is from the blocks after a key's own: the last ones of the cache must be unused."""

    def broken(self: Indexer, *given: object) -> Tensor:
        *before, view = given
        assert isinstance(view, IndexView)
        other = as_layout(view.layout, "shuffled")
        chosen: Tensor = choose(self, *before, replace(view, layout=other))
        return chosen

    return broken


def _half_of_the_heads(run: Make) -> Make:
    """What a decode kernel leaves behind whose split metadata has room for half of its heads."""

    def broken(self: MLA, *given: object) -> Tensor:
        out: Tensor = run(self, *given)
        out[:, out.shape[1] // 2 :] = 0.0
        return out

    return broken


_O = "engine oracle"

STORY_FAULTS = [
    Fault("engine-half-rotation", "latent layers rotate half, by a table made for half (story 1)",
          _O, "ling", ropes, "table", _half_rotates(rebuilt=True)),
    Fault("engine-half-rotation-kept-frequencies",
          "latent layers rotate half, by the right frequencies (story 1)",
          _O, "ling", ropes, "table", _half_rotates(rebuilt=False)),
    Fault("engine-index-unrotated", "the indexer drops its rotated queries and keys (story 4)",
          _O, "v32-near", MLA, "_select", _index_rope(times=0)),
    Fault("engine-index-rotated-twice", "the indexer rotates queries and keys twice (story 4)",
          _O, "v32-near", MLA, "_select", _index_rope(times=2)),
    Fault("engine-index-read-shuffled", "index keys read as shuffled at block size 1 (story 4)",
          "solo = batch", "v32-block-1", Indexer, "choose", _read_shuffled),
    Fault("decode-half-heads", "decode computes half of the heads (story 5, emulated)",
          _O, "v3-near", MLA, "_decode", _half_of_the_heads),
]  # fmt: skip
