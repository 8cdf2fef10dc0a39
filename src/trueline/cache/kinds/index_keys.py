"""The indexer's key of each token, in the layers that have an indexer of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trueline.cache.index import IndexStore, IndexView
from trueline.cache.kinds import KindContext, PagedKind
from trueline.cache.layout import IndexLayout
from trueline.errors import UsageError
from trueline.spec.mixer import MLASpec
from trueline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKeys(PagedKind[IndexView]):
    name: ClassVar[str] = "index_keys"
    label: ClassVar[str | None] = "selection"
    layers: tuple[int, ...]
    layout: IndexLayout
    topk: int

    @classmethod
    def of(cls, spec: ModelSpec, context: KindContext) -> IndexKeys | None:
        """The layers must choose from alike."""
        indexers = {
            i: layer.mixer.indexer
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.mixer, MLASpec) and layer.mixer.indexer is not None
        }
        if len({(indexer.head_dim, indexer.topk) for indexer in indexers.values()}) > 1:
            raise UsageError(f"{spec.family}: indexers of different widths or topk")
        own = {i: indexer for i, indexer in indexers.items() if not indexer.shared}
        if not own:
            return None
        first, config = next(iter(own.values())), context.config
        wanted, kind = config.index_cache_dtype, config.index_cache_layout
        storage = str(context.compute).removeprefix("torch.") if wanted == "auto" else wanted
        layout = IndexLayout(
            first.head_dim, context.block_size, storage, "rows" if kind == "auto" else kind
        )
        return cls(layers=tuple(own), layout=layout, topk=first.topk)

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"the {self.topk:,} best positions; keys in {layout.storage}, layout '{layout.kind}', "
            f"{layout.token_bytes} bytes a token and layer"
        )

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        return IndexStore.block_bytes(self.layout, len(self.layers))

    def allocate(self, num_blocks: int) -> IndexStore:
        return IndexStore(self.layout, len(self.layers), num_blocks)
