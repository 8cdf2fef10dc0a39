"""How much of everything: blocks of the paged cache, slots of the state cache, rows and tokens of a
step, from the memory there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trueline.cache.index import IndexStore
from trueline.cache.layout import IndexLayout
from trueline.cache.state import StateStore
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.errors import UsageError
from trueline.ops.mla_decode import Tiling
from trueline.spec.mixer import IndexerSpec, LightningSpec, MLASpec
from trueline.spec.model import ModelSpec

AUTO_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
# Keys per product where bits must not depend on the schedule.
FIXED_TILING = Tiling(64, full=True)
# Snapshots of states that the prefix cache may keep, and how far apart those of a prompt lie.
SNAPSHOTS_PER_SEAT = 4
AUTO_SPACING = 512
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Set aside for what a step computes before that has been measured.
GPU_WORKSPACE = 4 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step may hold, and how much memory we may take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    overlap: bool

    @staticmethod
    def of(config: EngineConfig, device: Device) -> Limits:
        seqs, tokens, share = (256, 8192, 0.9) if device.is_gpu else (64, 2048, 0.5)
        seqs = seqs if config.max_num_seqs is None else config.max_num_seqs
        if config.max_num_batched_tokens is None:
            tokens = max(tokens, seqs)
        else:
            tokens = config.max_num_batched_tokens
        if config.gpu_memory_utilization is not None:
            share = config.gpu_memory_utilization
        overlap = device.is_gpu if config.overlap is None else config.overlap
        return Limits(seqs, tokens, share, overlap)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a GPU, after the weights have been loaded."""

    used: int
    """By anybody, weights included."""
    workspace: int
    """What the largest steps need beside them."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Memory of the layers that keep a state per sequence."""

    num_slots: int
    dtype: torch.dtype
    tail: int
    """Positions whose keys and values are kept beside a state: bits must not depend on cuts."""
    slot_bytes: int
    spacing: int
    """Tokens between the snapshots of a long prompt."""

    def __str__(self) -> str:
        return (
            f"{self.num_slots * self.slot_bytes / 1e6:,.1f} MB: {self.num_slots} slots of "
            f"{self.slot_bytes / 1e6:,.2f} MB, {self.dtype}, a snapshot every {self.spacing} tokens"
        ).replace("torch.", "")


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The cache of the indexer's keys, and how many positions it lets through."""

    layout: IndexLayout
    topk: int
    block_bytes: int

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"the {self.topk:,} best positions; keys in {layout.storage}, layout '{layout.kind}', "
            f"{layout.token_bytes} bytes a token and layer"
        )


def cache_budget(
    config: EngineConfig, device: Device, limits: Limits, weights: int, measured: Measured | None
) -> int:
    """Bytes for blocks and slots."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if not device.is_gpu:
        return int((device.free_memory - weights) * limits.memory_share)
    if measured is None:
        used = device.total_memory - device.free_memory + weights
        measured = Measured(used, GPU_WORKSPACE)
    return int(device.total_memory * limits.memory_share) - measured.used - measured.workspace


def latent_mixers(spec: ModelSpec) -> list[MLASpec]:
    """Those of the layers with a paged cache: rows of one layout, so that one table of blocks
    serves them all. A layer that differs must not get the rows of the first silently."""
    found = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, MLASpec)]
    widths = {(mixer.kv_lora_rank, mixer.qk_rope_head_dim, mixer.heads) for mixer in found}
    if len(widths) != 1:
        raise UsageError(
            f"{spec.family}: accepted so far: models with latent attention in one layer or more, "
            "and as many heads and rows of the same widths in all of these"
        )
    return found


def own_indexers(spec: ModelSpec) -> list[IndexerSpec]:
    """Of the layers that choose positions themselves; they must choose from alike."""
    mixers = (layer.mixer for layer in spec.layers)
    indexers = [mixer.indexer for mixer in mixers if isinstance(mixer, MLASpec) and mixer.indexer]
    if len({(indexer.head_dim, indexer.topk) for indexer in indexers}) > 1:
        raise UsageError(f"{spec.family}: indexers of different widths or topk")
    return [indexer for indexer in indexers if not indexer.shared]


def linear_mixers(spec: ModelSpec) -> list[LightningSpec]:
    found = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, LightningSpec)]
    if any(mixer.cache_fields != found[0].cache_fields for mixer in found):
        raise UsageError(f"{spec.family}: linear layers with states of different widths")
    return found


def index_plan(
    indexers: list[IndexerSpec], config: EngineConfig, compute: torch.dtype, block_size: int
) -> IndexPlan | None:
    if not indexers:
        return None
    wanted = config.index_cache_dtype
    storage = str(compute).removeprefix("torch.") if wanted == "auto" else wanted
    kind = "rows" if config.index_cache_layout == "auto" else config.index_cache_layout
    layout = IndexLayout(indexers[0].head_dim, block_size, storage, kind)
    return IndexPlan(layout, indexers[0].topk, IndexStore.block_bytes(layout, len(indexers)))


def state_plan(
    mixers: list[LightningSpec],
    config: EngineConfig,
    storage: torch.dtype,
    block_size: int,
    budget: int,
    limits: Limits,
) -> StatePlan:
    """A slot for every sequence and some for snapshots, in at most half of the cache's memory."""
    wanted = config.mamba_cache_dtype
    dtype = storage if wanted == "auto" else DTYPES[wanted]
    tail = FIXED_TILING.size if config.batch_invariant else 0
    heads, width = mixers[0].heads.count, mixers[0].head_dim
    each = StateStore.slot_bytes(len(mixers), heads, width, width, dtype, tail)
    if config.num_state_slots is not None:
        count = config.num_state_slots
    else:
        snapshots = SNAPSHOTS_PER_SEAT if config.enable_prefix_caching else 0
        count = min(limits.max_num_seqs * (1 + snapshots), budget // 2 // each - 1)
    if count < 1:
        raise UsageError(
            f"the states have {budget // 2:,} bytes, one takes {each:,} and a spare one is needed: "
            "raise kv_cache_memory_bytes or gpu_memory_utilization, or set num_state_slots"
        )
    spacing = config.snapshot_spacing
    if spacing == "auto":
        spacing = -(-AUTO_SPACING // block_size) * block_size
    return StatePlan(count + 1, dtype, tail, each, spacing)


def max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise UsageError(
            f"max_model_len = {config.max_model_len}: the model takes up to {spec.max_position} "
            "(max_position_embeddings)"
        )
    return config.max_model_len


def num_blocks(
    config: EngineConfig, limits: Limits, budget: int, block_bytes: int, blocks_per_seq: int
) -> int:
    """Enough for every sequence at full length, or what memory allows; one more as null block."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override + 1
    fits = budget // block_bytes
    if fits < 2:
        raise UsageError(
            f"the cache has {budget:,} bytes, one block takes {block_bytes:,}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return min(fits, limits.max_num_seqs * blocks_per_seq + 1)
