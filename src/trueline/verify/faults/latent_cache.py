"""Mistakes with latents in fp8: scales, groups, variants, and what is quantised."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trueline.cache import layout as layouts
from trueline.cache import store
from trueline.cache.kinds import latent as kind
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.mla_decode import cpu as decode_cpu
from trueline.verify.faults import Fault, Make

_CACHE, _OPS, _ENGINE, _BITS, _ANY = (
    "latent cache",
    "fp8 op = reference",
    "fp8 latents",
    "fp8 latents, bitwise",
    "v3-fp8-cache",
)


def _neighbours(dequantise: Make) -> Make:
    return lambda codes, scales: dequantise(codes, scales.roll(1, -1))


def _edge_off_by_one(dequantise: Make) -> Make:
    """The first channel of a group has the scale of the group before."""

    def broken(codes: Tensor, scales: Tensor) -> Tensor:
        made: Tensor = dequantise(codes, scales)
        made[:, 1:, 0] = codes[:, 1:, 0] * scales[:, :-1]
        return made

    return broken


def _range_of_the_other(scales: Make) -> Make:
    def broken(x: Tensor, fp8: object, power_of_two: bool) -> Tensor:
        return scales(x, layouts.STORAGES["e4m3fnuz"].fp8, power_of_two)  # type: ignore[no-any-return]

    return broken


def _rounded_to_nearest(scales: Make) -> Make:
    """A scale of a power of two that is too small for the largest number."""

    def broken(x: Tensor, fp8: object, power_of_two: bool) -> Tensor:
        wanted: Tensor = scales(x, fp8, False)
        return torch.exp2(wanted.log2().round()) if power_of_two else wanted

    return broken


def _no_floor(scales: Make) -> Make:
    def broken(x: Tensor, fp8: layouts.Fp8, power_of_two: bool) -> Tensor:
        made: Tensor = scales(x, fp8, power_of_two)
        return made.minimum(x.abs().amax(-1) / fp8.largest)

    return broken


def _rope_quantised(write: Make) -> Make:
    def broken(self: LatentView, cells: Tensor, latent: Tensor, rope: Tensor) -> None:
        coarse = rope.float().to(torch.float8_e4m3fn).to(rope.dtype)
        write(self, cells, latent, coarse if self.layout.fp8 else rope)

    return broken


def _values_unscaled(attend: Make) -> Make:
    """Keys are read with their scales, values as bare codes."""

    def broken(
        q: Tensor, view: LatentView, group: decode_cpu.Group, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        if view.layout.fp8 is None:
            return attend(q, view, group, softmax_scale)  # type: ignore[no-any-return]
        values = _unscaled(view).gather(group.cells)[..., : view.layout.latent].float()
        scores = torch.bmm(q, view.gather(group.cells).mT.float()).mul_(softmax_scale)
        if group.beyond is not None:
            scores.masked_fill_(group.beyond[:, None], float("-inf"))
        return decode_cpu.softmax_part(scores, values, group.invariant)

    return broken


def _scales_not_poisoned(poison: Make) -> Make:
    def broken(self: LatentStore, cells: slice | list[int]) -> None:
        poison(self, cells)
        if self.layout.fp8:
            codes, scales, _ = store.fp8_parts(self.rows, self.layout)
            codes.view(torch.uint8)[:, cells] = 0
            scales[:, cells] = 1.0

    return broken


def _read_unscaled(gather: Make) -> Make:
    def broken(self: LatentView, cells: Tensor) -> Tensor:
        return gather(_unscaled(self), cells)  # type: ignore[no-any-return]

    return broken


def _unscaled(view: LatentView) -> LatentView:
    """The same codes with scales of 1."""
    if view.layout.fp8 is None:
        return view
    rows = view.rows.clone()
    store.fp8_parts(rows, view.layout)[1].fill_(1.0)
    return replace(view, rows=rows)


def _of_the_step(scales: Make) -> Make:
    """One scale for a group of channels of all tokens that are written together."""

    def broken(x: Tensor, fp8: object, power_of_two: bool) -> Tensor:
        made: Tensor = scales(x, fp8, power_of_two)
        return made.amax(0, keepdim=True).expand_as(made)

    return broken


LATENT_FAULTS: list[Fault] = [
    Fault("latent-scale-of-the-neighbour", "a group read with the scale of the one before",
          _CACHE, _ANY, store, "dequantise", _neighbours),
    Fault("latent-scale-divided", "codes divided by their scale", _CACHE, _ANY,
          store, "dequantise", lambda _: lambda codes, scales: codes / scales[..., None]),
    Fault("latent-group-edge", "a group's first channel read with the scale before",
          _CACHE, _ANY, store, "dequantise", _edge_off_by_one),
    Fault("latent-rope-quantised", "the rotated key rounded to fp8 too", _CACHE, _ANY,
          LatentView, "write", _rope_quantised),
    Fault("latent-fnuz-bytes", "e4m3fnuz written and read as e4m3fn", _CACHE, _ANY,
          store, "DTYPES", lambda dtypes: dtypes | {"e4m3fnuz": torch.float8_e4m3fn}),
    Fault("latent-fnuz-range", "latents in e4m3fn scaled to the range of e4m3fnuz", _CACHE, _ANY,
          store, "fp8_scales", _range_of_the_other),
    Fault("latent-scale-nearest", "scales rounded to the nearest power of two", _CACHE, _ANY,
          store, "fp8_scales", _rounded_to_nearest),
    Fault("latent-scale-floor", "a group of zeros has a scale of zero", _CACHE, _ANY,
          store, "fp8_scales", _no_floor),
    Fault("latent-poison-spares-fp8", "fp8 rows that nobody owns hold numbers", _CACHE, _ANY,
          LatentStore, "_poison", _scales_not_poisoned),
    Fault("latent-value-unscaled", "values read with a scale of 1", _OPS, _ANY,
          decode_cpu, "_attend", _values_unscaled),
    Fault("latent-codes-for-numbers", "codes read without their scales", _ENGINE, _ANY,
          LatentView, "gather", _read_unscaled),
    Fault("latent-storage-ignored", "kv_cache_dtype changes nothing", _ENGINE, _ANY,
          kind, "storage", lambda _: lambda *given: None),
    Fault("latent-scale-of-the-step", "tokens written together share their scales", _BITS, _ANY,
          store, "fp8_scales", _of_the_step),
]  # fmt: skip
