"""Choices made once, at load: which implementation runs each op and why, in which dtype, with how
much cache. Printed at start; nobody decides again later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trueline.cache.index import IndexStore
from trueline.cache.layout import IndexLayout, LatentLayout
from trueline.cache.state import StateStore
from trueline.cache.store import LatentStore
from trueline.choices import LAYERS, OWN, Choice, choose_layers, choose_op
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.errors import UsageError
from trueline.models.parameters import parameters
from trueline.ops.mla_decode import Tiling
from trueline.ops.registry import NEEDS, OPS, REGISTRY, Need, implementation, refusals, runnable
from trueline.spec.mixer import IndexerSpec, LightningSpec, MLASpec
from trueline.spec.model import ModelSpec

AUTO_BLOCK_SIZE = 16
# Keys per product where nothing depends on it, and where bits must not depend on the schedule.
FREE_TILING = Tiling(1024, full=False)
FIXED_TILING = Tiling(64, full=True)
SMALL_MODEL = 64_000_000
PACKING = ("linear", "head_product", "mlp", "experts")
"""Ops that keep weights."""
PROBES = 6
CLEARLY = 1.5
# Snapshots of states that the prefix cache may keep, and how far apart those of a prompt lie.
SNAPSHOTS_PER_SEAT = 4
AUTO_SPACING_BLOCKS = 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


@dataclass(frozen=True)
class Plan:
    device: Device
    threads: int
    choices: dict[str, Choice]
    layers: dict[str, Choice]
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    dtype_reason: str
    layout: LatentLayout
    num_blocks: int
    state: StatePlan | None
    index: IndexPlan | None
    max_model_len: int
    tiling: Tiling
    batch_invariant: bool
    weight_bytes: int
    cache_bytes: int

    def op(self, name: str) -> Any:
        return implementation(name, self.choices[name].name)

    def layer(self, kind: str) -> Any:
        return LAYERS.get(kind, self.layers[kind].name)

    def lines(self) -> Iterator[str]:
        yield f"device       {self.device.kind} ({self.device.name}), {self.threads} threads"
        yield f"compute      {self.compute_dtype} ({self.dtype_reason})".replace("torch.", "")
        yield f"weights      {self.weight_bytes / 1e6:,.1f} MB in {self.weight_dtype}".replace(
            "torch.", ""
        )
        tokens = (self.num_blocks - 1) * self.layout.block_size
        yield (
            f"cache        {self.cache_bytes / 1e6:,.1f} MB: {self.num_blocks} blocks of "
            f"{self.layout.block_size} positions ({tokens:,} tokens), "
            f"sequences up to {self.max_model_len:,}"
        )
        if self.state:
            yield f"states       {self.state}"
        if self.index:
            yield f"selection    {self.index}"
        yield f"invariance   {'bitwise, whatever the batch' if self.batch_invariant else 'off'}"
        for op, choice in self.choices.items():
            yield f"{op:<12} {choice.name} ({choice.reason})"
        for kind, choice in self.layers.items():
            if choice.name != OWN:
                yield f"layer        {kind}: {choice.name} ({choice.reason})"


def make_plan(spec: ModelSpec, config: EngineConfig, device: Device) -> Plan:
    if spec.not_runnable:
        raise UsageError(f"{spec.family}: {spec.not_runnable}")
    for op, name in config.ops.items():
        REGISTRY.check_name(op, name)
    storage = DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
    compute, reason = choose_compute_dtype(storage)
    latent, linear = latent_mixers(spec), linear_mixers(spec)
    size = AUTO_BLOCK_SIZE if config.block_size == "auto" else config.block_size
    index = _index_plan(own_indexers(spec), config, compute, size)
    has: dict[Need, Any] = {"states": linear, "indexer": index}
    used = [op for op in OPS if op not in NEEDS or has[NEEDS[op]]]
    keys = index.layout if index else None
    choices = {op: choose_op(op, config, compute, keys, device.kind) for op in used}
    layout = LatentLayout(latent[0].kv_lora_rank, latent[0].qk_rope_head_dim, size)
    max_len = _max_model_len(spec, config)
    # Kernels of ours multiply by bfloat16 as it is; others want weights as they compute.
    ours = all(choices[op].name == "native" for op in PACKING)
    kept = storage if ours and storage == torch.bfloat16 else compute
    weights = sum(p.count for p in parameters(spec)) * kept.itemsize
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = int((device.free_memory - weights) * config.gpu_memory_utilization)
    state = _state_plan(linear, config, storage, size, budget) if linear else None
    if state:
        budget -= state.num_slots * state.slot_bytes
    block_bytes = LatentStore.block_bytes(layout, len(latent), compute)
    block_bytes += index.block_bytes if index else 0
    num_blocks = _num_blocks(config, budget, block_bytes, -(-max_len // size))
    # Where a step takes microseconds, threads only wait for each other.
    threads = device.threads if weights >= SMALL_MODEL else 1
    return Plan(
        device,
        threads,
        choices,
        choose_layers(spec, config, compute),
        kept,
        compute,
        reason,
        layout,
        num_blocks,
        state,
        index,
        max_len,
        FIXED_TILING if config.batch_invariant else FREE_TILING,
        config.batch_invariant,
        weights,
        num_blocks * block_bytes,
    )


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


def _index_plan(
    indexers: list[IndexerSpec], config: EngineConfig, compute: torch.dtype, block_size: int
) -> IndexPlan | None:
    if not indexers:
        return None
    wanted = config.index_cache_dtype
    storage = str(compute).removeprefix("torch.") if wanted == "auto" else wanted
    kind = "rows" if config.index_cache_layout == "auto" else config.index_cache_layout
    layout = IndexLayout(indexers[0].head_dim, block_size, storage, kind)
    return IndexPlan(layout, indexers[0].topk, IndexStore.block_bytes(layout, len(indexers)))


def _state_plan(
    mixers: list[LightningSpec],
    config: EngineConfig,
    storage: torch.dtype,
    block_size: int,
    budget: int,
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
        count = min(config.max_num_seqs * (1 + snapshots), budget // 2 // each - 1)
    if count < 1:
        raise UsageError(
            f"the states have {budget // 2:,} bytes, one takes {each:,} and a spare one is needed: "
            "raise kv_cache_memory_bytes or gpu_memory_utilization, or set num_state_slots"
        )
    spacing = config.snapshot_spacing
    if spacing == "auto":
        spacing = AUTO_SPACING_BLOCKS * block_size
    return StatePlan(count + 1, dtype, tail, each, spacing)


def choose_compute_dtype(storage: torch.dtype) -> tuple[torch.dtype, str]:
    """float32 as it is; a 16-bit dtype only where this CPU multiplies clearly faster in it, since
    all but products is faster in float32."""
    if storage == torch.float32:
        return storage, "as stored"
    name = str(storage).removeprefix("torch.")
    if refusals("linear", "onednn", storage):
        return torch.float32, f"{name} products do not run here"
    first = runnable("linear", torch.float32)[0]
    # our kernels take bfloat16 weights as they are
    kept = storage if (first, storage) == ("native", torch.bfloat16) else torch.float32
    wide = _product_time(implementation("linear", first), kept, torch.float32)
    narrow = _product_time(implementation("linear", "onednn"), storage, storage)
    ratio = wide / narrow
    reason = f"{name} products take {1 / ratio:.2f} of the time they take in float32 here"
    return (storage if ratio > CLEARLY else torch.float32), reason


def _product_time(linear: Any, weight: torch.dtype, compute: torch.dtype) -> float:
    """As decode does it: few rows, weights that no cache holds."""
    packed = [linear.pack(torch.ones(2048, 2048, dtype=weight)) for _ in range(PROBES)]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for rows in (1, 8):
            x = torch.ones(rows, 2048, dtype=compute)
            for each in packed:
                linear.run(x, each)
        best = min(best, time.perf_counter() - start)
    return best


def _max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise UsageError(
            f"max_model_len = {config.max_model_len}: the model takes up to {spec.max_position} "
            "(max_position_embeddings)"
        )
    return config.max_model_len


def _num_blocks(config: EngineConfig, budget: int, block_bytes: int, blocks_per_seq: int) -> int:
    """Enough for every sequence at full length, or what memory allows; one more as null block."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override + 1
    fits = budget // block_bytes
    if fits < 2:
        raise UsageError(
            f"the cache has {budget:,} bytes, one block takes {block_bytes:,}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    return min(fits, config.max_num_seqs * blocks_per_seq + 1)
