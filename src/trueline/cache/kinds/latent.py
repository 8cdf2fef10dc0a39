"""The latent of each token and its rotated key: what latent attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from trueline.cache.kinds import KindContext, PagedKind
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentStore, LatentView
from trueline.errors import UsageError
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent(PagedKind[LatentView]):
    name: ClassVar[str] = "latent"
    layers: tuple[int, ...]
    mixer: MLASpec
    """Of one of the layers: all are alike in what is said of rows and heads."""
    layout: LatentLayout
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> Latent | None:
        """Rows of one layout, so that one block table serves them all. A layer that differs must
        not get the rows of the first silently."""
        mixers = enumerate(layer.mixer for layer in spec.layers)
        layers = {i: mixer for i, mixer in mixers if isinstance(mixer, MLASpec)}
        if not layers:
            return None
        widths = {
            (m.kv_lora_rank, m.qk_rope_head_dim, m.heads, m.qk_nope_head_dim, m.v_head_dim)
            for m in layers.values()
        }
        if len(widths) != 1:
            raise UsageError(
                f"{spec.family}: accepted so far: models with as many heads and rows of the same "
                "widths in all layers with latent attention"
            )
        mixer = next(iter(layers.values()))
        layout = LatentLayout(mixer.kv_lora_rank, mixer.qk_rope_head_dim, context.block_size)
        return cls(layers=tuple(layers), mixer=mixer, layout=layout, dtype=context.compute)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return LatentStore.block_bytes(self.layout, len(self.layers), self.dtype)

    def allocate(self, num_blocks: int) -> LatentStore:
        return LatentStore(self.layout, len(self.layers), num_blocks, self.dtype)
