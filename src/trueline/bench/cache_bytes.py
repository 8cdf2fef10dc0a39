"""What a sequence takes of the paged cache, by what is kept: the blocks it holds, in bytes of the
memory allocated for them, beside what the model's spec says that it must keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trueline.cache.blocks import NULL_BLOCK
from trueline.cache.kinds import PagedStore
from trueline.cache.kinds.entries import EntriesIndex
from trueline.cache.kinds.index_keys import IndexKeys
from trueline.cache.layout import SCALE_BYTES, STORAGES, Storage
from trueline.cache.parts import Guarded
from trueline.engine.executor import local_runner
from trueline.llm import LLMEngine
from trueline.spec.mixer import CompressedSpec, CompressorSpec, MLASpec
from trueline.spec.model import DTYPE_BYTES, ModelSpec

KEYS = (IndexKeys, EntriesIndex)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindBytes:
    kind: str
    layers: int
    positions: int
    """Of the sequence that have been computed."""
    formula: int
    """Bytes of them that the layers must keep."""
    block: int
    """Bytes of a block."""
    num_blocks: int
    """That the sequence has."""

    @property
    def held(self) -> int:
        return self.block * self.num_blocks


def cache_bytes(engine: LLMEngine, request_id: str) -> tuple[KindBytes, ...]:
    """Of a running request."""
    core = engine.core
    caches, live = local_runner(core.executor).caches, core.requests[request_id]
    positions, found = live.num_written, list[KindBytes]()
    kinds = {kind.name: kind for kind in core.plan.kinds}
    keys = [kind.layout.storage for kind in kinds.values() if isinstance(kind, KEYS)]
    itemsize = core.plan.compute_dtype.itemsize
    kept = kept_bytes(engine.spec, itemsize, STORAGES[keys[0] if keys else "float32"], positions)
    for number, group in enumerate(core.plan.groups):
        table = live.tables[number]
        for kind in group.kinds:
            each = KindBytes(
                kind=kind.name,
                layers=len(kind.layers),
                positions=positions,
                formula=kept[kind.name],
                block=allocated_block(caches.paged[kind.name]),
                num_blocks=len(table) - table.count(NULL_BLOCK),
            )
            found.append(each)
    return tuple(found)


def allocated_block(store: PagedStore[object]) -> int:
    """Of the memory that a store has allocated, over all layers, what each block has."""
    assert isinstance(store, Guarded)
    parts = store.parts()
    memory = {each.data_ptr(): each for each in (part.words.untyped_storage() for part in parts)}
    whole = sum(each.nbytes() for each in memory.values())
    beside = sum(part.words.numel() * part.words.itemsize for part in parts if part.constant)
    (places,) = {part.num_places for part in parts if not part.constant}
    return (whole - beside) // places


def kept_bytes(
    spec: ModelSpec, itemsize: int, key_storage: Storage, positions: int
) -> Counter[str]:
    """By kind, over all layers, from the model's spec alone: rows of `itemsize` bytes a number,
    index keys as they are stored, tails in float32 and as long as they may get."""
    found = Counter[str]()

    def keys(dim: int) -> int:
        return dim * key_storage.itemsize + (SCALE_BYTES if key_storage.fp8 else 0)

    def tails(pool: CompressorSpec) -> int:
        return pool.tail * 2 * pool.width * DTYPE_BYTES["float32"]

    for mixer in (layer.mixer for layer in spec.layers):
        match mixer:
            case MLASpec():
                row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
                found["latent"] += positions * row * itemsize
                if mixer.indexer is not None and not mixer.indexer.shared:
                    found["index_keys"] += positions * keys(mixer.indexer.head_dim)
            case CompressedSpec():
                row, form, pool = mixer.head_dim * itemsize, mixer.form, mixer.compressor
                found["window"] += min(positions, mixer.window) * row
                if pool is not None:
                    found[f"entries_{form}"] += positions // pool.ratio * row
                    found[f"tails_{form}"] += tails(pool)
                if mixer.indexer is not None:
                    pool = mixer.indexer.compressor
                    found["entries_index"] += positions // pool.ratio * keys(pool.dim)
                    found["tails_index"] += tails(pool)
    return found
