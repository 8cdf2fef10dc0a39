"""What a running engine keeps of each position where its latents are stored in fp8, and the
reference over just that.

Two computations of one latent may differ in the last bit, and so by a whole code: the reference
cannot quantise for itself. It attends to the rows that the engine stored, read a second time from
their bytes, and holds each against its own: within half a step of the code, the rotated key as it
is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from trueline.cache.kinds.latent import Latent
from trueline.cache.layout import LatentLayout
from trueline.cache.store import LatentView
from trueline.engine.batch import Batch
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.ops.latent_write.stored import stored_rows
from trueline.reference import model as reference_model
from trueline.reference.config import Config
from trueline.reference.functional import Pair, Params
from trueline.verify.failed import CheckFailed
from trueline.verify.ops.data import group_amax

HALF_STEP = 2.0**-4
"""Of a code that is not next to zero, relative to its number."""
FLOAT32 = 1e-4
"""How far the engine's latents may be from the reference's before they are quantised, relative to
the largest of a group."""


@dataclass
class LatentRecorder:
    """Every row at the time it is written, by request, layer and position."""

    layout: LatentLayout
    layers: tuple[int, ...]
    rows: dict[int, dict[int, dict[int, Tensor]]] = field(default_factory=dict)
    _step: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(core: EngineCore) -> LatentRecorder | None:
        """Of a core whose latents are in fp8. It stands in front of the op that writes them."""
        kind = core.plan.kind(Latent)
        if kind is None or kind.layout.fp8 is None:
            return None
        recorder = LatentRecorder(kind.layout, kind.layers)
        ops = local_runner(core.executor).decoder.ops.latent
        assert ops is not None
        op = ops.latent_write

        def run(
            latent: Tensor, key: Tensor, queries: Tensor, view: LatentView, cells: Tensor,
            **options: object,
        ) -> Tensor:  # fmt: skip
            out = op.run(latent, key, queries, view, cells, **options)  # type: ignore[arg-type]
            recorder._step.append(stored_rows(view, cells).cpu())
            return out

        ops.latent_write = SimpleNamespace(capabilities=op.capabilities, run=run)
        return recorder

    def take(self, batch: Batch) -> None:
        """The rows of the step that has just been computed."""
        for layer, rows in zip(self.layers, self._step, strict=True):
            for row in batch.rows:
                kept = self.rows.setdefault(row.id, {}).setdefault(layer, {})
                for offset, values in enumerate(rows[row.tokens]):
                    kept[row.start + offset] = values
        self._step.clear()

    def kept(self, request: int) -> CachedLatents:
        return CachedLatents(self.layout, self.rows.get(request, {}))


@dataclass(frozen=True)
class CachedLatents:
    """Of one request: layer -> position -> row."""

    layout: LatentLayout
    rows: Mapping[int, Mapping[int, Tensor]]

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Meanwhile the reference attends to these rows."""
        own = reference_model.latent

        def cached(
            config: Config,
            params: Params,
            at: str,
            x: Tensor,
            rope: Pair,
        ) -> Pair:
            layer = int(at.split(".")[2])
            held = torch.stack([self.rows[layer][p] for p in range(len(x))])
            self._compare(f"layer {layer}", held, *own(config, params, at, x, rope))
            held = held.to(x.dtype)
            return held[:, : self.layout.latent], held[:, self.layout.latent :]

        reference_model.latent = cached
        try:
            yield
        finally:
            reference_model.latent = own

    def _compare(self, what: str, held: Tensor, latent: Tensor, key: Tensor) -> None:
        assert self.layout.fp8 is not None
        variant, width = self.layout.fp8.variant, self.layout.latent
        amax = group_amax(latent, self.layout.fp8.group)
        # a scale may be twice as large as it must, where it is a power of two
        smallest = 2 * amax / variant.largest * variant.step / 2
        limit = HALF_STEP * latent.abs() + smallest + FLOAT32 * amax
        self._within(f"{what}: latent", held[:, :width] - latent, limit)
        self._within(f"{what}: rotated key", held[:, width:] - key, FLOAT32 * key.abs().max())

    def _within(self, what: str, off: Tensor, limit: Tensor) -> None:
        if not bool((off.abs() <= limit).all()):
            position = int((off.abs() / limit).amax(1).argmax())
            raise CheckFailed(f"fp8 latents: {what} of position {position} is not what was stored")
