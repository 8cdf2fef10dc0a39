"""A latent cache as Triton kernels get it: `rows` (numbers, or fp8 codes), `scales` (None where
there are none) and `keys` are the same memory in three dtypes. Places are counted in numbers of
each: a row's latent begins at cell × ROW, its scales at cell × SCALE_ROW + SCALE_AT, its rotated
key at cell × KEY_ROW + KEY_AT. GROUP channels share a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.cache.fp8 import DTYPES
from trueline.cache.layout import SCALE_BYTES
from trueline.cache.store import LatentView
from trueline.ops.capabilities import Context, fp8_latent_refusals


def latent_pointers(view: LatentView) -> tuple[Tensor, Tensor | None, Tensor]:
    rows, fp8 = view.rows, view.layout.fp8
    assert rows.is_contiguous()
    if fp8 is None:
        return rows, None, rows
    refused = fp8_latent_refusals(Context(dtype=view.dtype, latent=view.layout))
    assert not refused, refused
    return rows.view(DTYPES[fp8.storage]), rows.view(torch.float32), rows.view(view.dtype)


def latent_places(view: LatentView) -> dict[str, int]:
    layout, width = view.layout, view.rows.shape[1]
    if layout.fp8 is None:
        return {
            "ROW": width,
            "KEY_ROW": width,
            "KEY_AT": layout.latent,
            "SCALE_ROW": 0,
            "SCALE_AT": 0,
            "GROUP": 1,
        }
    key = view.dtype.itemsize
    return {
        "ROW": width,
        "KEY_ROW": width // key,
        "KEY_AT": layout.rope_start // key,
        "SCALE_ROW": width // SCALE_BYTES,
        "SCALE_AT": layout.scales_start // SCALE_BYTES,
        "GROUP": layout.fp8.group,
    }
