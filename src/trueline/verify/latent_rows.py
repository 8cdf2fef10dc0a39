"""What a running engine keeps of each position where its latents are stored in fp8, and the
reference over just that.

Two computations of one latent may differ in the last bit, and so by a whole code: the reference
cannot quantise for itself. It attends to the rows that the engine stored, read a second time from
their bytes, and holds each against its own, which must round to that row but for an error of
float32 before the rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from trueline.verify import rounding
from trueline.verify.failed import CheckFailed

FLOAT32 = 2e-5
"""How far the engine's rows may be from the reference's before they are quantised, relative to the
largest number of a row."""


@dataclass
class LatentRecorder:
    """Every row at the time it is written, by request, layer and position."""

    layout: LatentLayout
    layers: tuple[int, ...]
    rows: dict[int, dict[int, dict[int, Tensor]]] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
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
        recorder.close = lambda: setattr(ops, "latent_write", op)
        return recorder

    def take(self, batch: Batch) -> None:
        """The rows of the step that has just been computed; there are none where no such layer
        runs."""
        if not self._step:
            return
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

        def held(layer: int, own: Tensor) -> Tensor:
            rows = torch.stack([self.rows[layer][p] for p in range(len(own))]).to(own.dtype)
            off = FLOAT32 * own.abs().amax(1, keepdim=True)
            right = rounding.fp8_rows_of(rows, own, off, self.layout)
            if not bool(right.all()):
                position = int((~right).nonzero()[0])
                raise CheckFailed(
                    f"fp8 latents: layer {layer}: the row of position {position} is not what was "
                    "stored"
                )
            return rows

        with latents_are(self.layout.latent, held):
            yield


@contextmanager
def latents_are(width: int, held: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Meanwhile the reference attends to the rows `held` for a layer; it is given the reference's
    own, [T, latent + rotated key]."""
    own = reference_model.latent

    def cached(config: Config, params: Params, at: str, x: Tensor, rope: Pair) -> Pair:
        rows = held(int(at.split(".")[2]), torch.cat(own(config, params, at, x, rope), -1))
        return rows[:, :width], rows[:, width:]

    reference_model.latent = cached
    try:
        yield
    finally:
        reference_model.latent = own
