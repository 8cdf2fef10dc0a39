"""What is written before attention, and what is left alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.ops.latent_write import LatentWrite, Parts
from trueline.ops.latent_write import reference as exact
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.ops.rope import cpu as rope
from trueline.spec.rope import Pairing
from trueline.verify.bounds import narrow, norm_bound, rounding
from trueline.verify.ops.basic import ROTATION
from trueline.verify.ops.data import SMALL, Dims, H, close, randn, require


def latent_write(
    op: LatentWrite,
    dtype: torch.dtype = torch.float32,
    dims: Dims = SMALL,
    heads: int = H,
    block_sizes: tuple[int, int, int] = (1, 3, 16),
) -> None:
    """Columns of one wider projection, as the layer has them; scattered cells, NaN elsewhere."""
    latent_dim, rope_dim = dims.cached
    pairings: tuple[Pairing, ...] = ("interleaved", "half-split")
    for pairing in pairings:
        for n, block_size in zip((1, 9, 5), block_sizes, strict=True):
            sizes = [latent_dim, rope_dim, heads * rope_dim, 3]
            whole = (randn(n, sum(sizes), seed=n) * 3).to(dtype)
            latent, key, rest, _ = torch.split(whole, sizes, dim=1)
            queries = rest.reshape(n, heads, rope_dim)
            angles = 100 * randn(n, rope_dim // 2, seed=3)
            norm = (0.5 + randn(latent_dim, seed=2).abs()).to(dtype)
            cells = (torch.arange(n) * 7 + 2) % 40
            layout = LatentLayout(*dims.cached, block_size)
            stores = [LatentStore(layout, 1, 48, dtype) for _ in range(2)]
            for store in stores:
                store.rows.fill_(torch.nan)
            before = whole.clone()
            given = partial(
                written, latent=latent, key=key, queries=queries, cells=cells, norm=norm,
                angles=angles, pairing=pairing, eps=1e-2 * n,
            )  # fmt: skip
            ours, wanted = given(op, stores[0].views[0]), given(exact, stores[1].views[0])
            what = f"latent_write, {pairing}, {n} tokens"
            require(torch.equal(whole, before), f"{what}: writes its input")
            # either side of a rounding, ours and the reference's, before the weight and after it
            twice = rounding(4 if narrow(dtype) else 1, dtype)
            rotated = rounding(ROTATION) + twice
            close(f"{what}: queries", ours[..., latent_dim:], wanted[..., latent_dim:], rotated)
            rows, exact_rows = (store.rows[0] for store in stores)
            for part, off in (
                (slice(0, latent_dim), norm_bound(latent_dim) + twice),
                (slice(latent_dim, None), rotated),
            ):
                close(f"{what}: cache", rows[cells, part], exact_rows[cells, part], off)
            others = torch.ones(len(rows), dtype=torch.bool)
            others[cells] = False
            require(bool(rows[others].isnan().all()), f"{what}: writes cells of others")


def written(
    op: LatentWrite,
    view: LatentView,
    latent: Tensor,
    key: Tensor,
    queries: Tensor,
    cells: Tensor,
    norm: Tensor,
    angles: Tensor,
    pairing: Pairing,
    eps: float,
) -> Tensor:
    return op.run(
        latent, key, queries, view, cells, norm=norm, eps=eps,
        cos=1.3 * angles.cos(), sin=1.3 * angles.sin(), pairing=pairing,
        parts=Parts(rms_norm, rope),
    )  # fmt: skip
