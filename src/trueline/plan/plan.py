"""Decisions made once, at load: which implementation runs each op and why, in which dtype, with how
much cache. Printed at start; nobody decides again later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from trueline.cache.kinds import (
    AnyKind,
    AnyPagedKind,
    AnySlottedKind,
    KindContext,
    PagedKind,
    SlottedKind,
    find_kinds,
    ops_of_kinds,
)
from trueline.config import EngineConfig
from trueline.device import Device, onednn_features
from trueline.errors import UsageError
from trueline.ops.capabilities import PUBLISHED, Context
from trueline.ops.mla_decode import Tiling
from trueline.ops.registry import OPS, REGISTRY, implementation, runnable
from trueline.ops.sampling import Sampling
from trueline.plan.canaries import CanaryPlan
from trueline.plan.memory import (
    AUTO_BLOCK_SIZE,
    GroupPlan,
    Limits,
    Measured,
    SlotPlan,
    cache_budget,
    max_model_len,
    plan_groups,
    slot_plan,
)
from trueline.plan.numerics import Numerics, choose_numerics
from trueline.plan.select import (
    OWN,
    LayerClass,
    Selection,
    choose,
    layer_class,
)
from trueline.spec.model import ModelSpec
from trueline.weights.formats import kept_formats, weight_bytes

# Keys per GEMM in batch-invariant mode, and outside of it.
FIXED_TILING = Tiling(64, full=True)
FREE_TILING = Tiling(1024, full=False)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL_MODEL = 64_000_000


K = TypeVar("K", bound=AnyKind)


@dataclass(frozen=True, kw_only=True)
class Plan:
    device: Device
    limits: Limits
    threads: int
    selections: dict[str, Selection]
    """Of ops that keep weights: for plain float."""
    by_format: dict[str, dict[str, Selection]]
    """Format -> op -> what packs weights that are stored in it."""
    layers: dict[str, Selection]
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    dtype_reason: str
    numerics: Numerics
    kinds: tuple[AnyKind, ...]
    """What the layers keep between steps."""
    groups: tuple[GroupPlan, ...]
    """Paged kinds by block length and window; each group has blocks of its own."""
    slots: SlotPlan | None
    """None where nothing is kept per sequence."""
    canaries: CanaryPlan | None
    max_model_len: int
    tiling: Tiling
    batch_invariant: bool
    graphs: bool
    """Whether decode steps are captured."""
    weight_bytes: int
    kept_formats: tuple[str, ...]
    """Quantised ones that some weights stay in."""
    cache_bytes: int
    workspace_bytes: int | None
    """What the largest steps need, where it has been measured."""

    @property
    def block_size(self) -> int:
        """Of the first group."""
        return self.groups[0].block_size

    @property
    def num_blocks(self) -> int:
        """Of the first group."""
        return self.groups[0].num_blocks

    @property
    def memory_bytes(self) -> dict[str, int]:
        """By what it is for, as far as it is known."""
        taken = {
            "weights": self.weight_bytes,
            "kv_cache": self.cache_bytes,
            "states": self.slots.num_slots * self.slots.slot_bytes if self.slots else None,
            "workspace": self.workspace_bytes,
        }
        return {use: size for use, size in taken.items() if size is not None}

    @property
    def slotted(self) -> list[AnySlottedKind]:
        return [kind for kind in self.kinds if isinstance(kind, SlottedKind)]

    def kind(self, cls: type[K]) -> K | None:
        return next((kind for kind in self.kinds if isinstance(kind, cls)), None)

    def of_layers(self, kept: Sequence[int]) -> Plan:
        """The same for a model that has these layers only."""
        groups = tuple(
            replace(group, kinds=tuple(kind.of_layers(kept) for kind in group.kinds))
            for group in self.groups
        )
        kinds = tuple(kind.of_layers(kept) for kind in self.kinds)
        return replace(self, kinds=kinds, groups=groups)

    @property
    def sampling(self) -> Sampling:
        return implementation("sampling", self.selections["sampling"].name)

    def layer(self, kind: str) -> LayerClass:
        return layer_class(kind, self.layers[kind].name)

    def lines(self) -> Iterator[str]:
        yield f"device       {self.device.kind} ({self.device.name}), {self._where()}"
        yield f"compute      {self.compute_dtype} ({self.dtype_reason})".replace("torch.", "")
        yield f"weights      {self.weight_bytes / 1e6:,.1f} MB in {self._weight_formats()}"
        if self.by_format or self.numerics.name == PUBLISHED:
            yield f"numerics     {self.numerics}"
        for group in self.groups:
            tokens = (group.num_blocks - 1) * group.block_size
            yield (
                f"cache        {group.num_blocks * group.block_bytes / 1e6:,.1f} MB: "
                f"{group.num_blocks} blocks of {group.block_size} positions ({tokens:,} tokens), "
                f"sequences up to {self.max_model_len:,}"
            )
        if self.workspace_bytes is not None:
            yield f"workspace    {self.workspace_bytes / 1e6:,.1f} MB, as measured"
        if self.slots:
            yield f"slots        {self.slots}"
        for kept in self.kinds:
            if kept.label:
                yield f"{kept.label:<12} {kept}"
        yield f"canaries     {self.canaries or 'off'}"
        yield f"invariance   {'bitwise, whatever the batch' if self.batch_invariant else 'off'}"
        for op, chosen in self.selections.items():
            yield f"{op:<12} {chosen.name} ({chosen.reason})"
            for stored, others in self.by_format.items():
                if op in others:
                    yield f"{op:<12} {stored}: {others[op].name} ({others[op].reason})"
        for kind, choice in self.layers.items():
            if choice.name != OWN:
                yield f"layer        {kind}: {choice.name} ({choice.reason})"

    def _weight_formats(self) -> str:
        """In which weights are kept."""
        return " and ".join((*self.kept_formats, str(self.weight_dtype).removeprefix("torch.")))

    def changes(self, expected: Plan) -> Iterator[str]:
        """What measuring has changed of a plan made before anything was loaded."""
        if (self.num_blocks, self.workspace_bytes) != (expected.num_blocks, None):
            yield (
                f"before load  {expected.cache_bytes / 1e6:,.1f} MB of cache in "
                f"{expected.num_blocks} blocks were expected"
            )

    def _where(self) -> str:
        if not self.device.is_gpu:
            return "1 thread" if self.threads == 1 else f"{self.threads} threads"
        device, share = self.device, self.limits.memory_share
        how = "captured decode steps" if self.graphs else "eager"
        return (
            f"{device.free_memory / 1e9:,.1f} of {device.total_memory / 1e9:,.1f} GB were free, "
            f"{share:.0%} are ours; {how}"
        )


def make_plan(
    spec: ModelSpec,
    config: EngineConfig,
    device: Device,
    measured: Measured | None = None,
    *,
    num_draft_tokens: int = 0,
) -> Plan:
    """Made before anything is loaded, from the memory that is free; on a GPU made again afterwards,
    from what was measured: only sizes differ then. `num_draft_tokens`: that a decode row may carry.
    """
    if spec.not_runnable:
        raise UsageError(f"{spec.family}: {spec.not_runnable}")
    for op, name in config.ops.items():
        REGISTRY.check_name(op, name)
    limits = Limits.of(config, device, num_draft_tokens)
    storage = DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
    compute, reason = choose_compute_dtype(storage, device)
    size = AUTO_BLOCK_SIZE[device.kind] if config.block_size == "auto" else config.block_size
    kinds, paged = _find_kinds(spec, config, size, storage, compute)
    slot_bytes = sum(kind.slot_bytes for kind in kinds if isinstance(kind, SlottedKind))
    unused = ops_of_kinds() - {op for kind in kinds for op in kind.ops}
    if spec.hyper_connections is None:
        unused.add("hyper_connections")
    context = _op_context(config, device, compute, kinds)
    numerics = choose_numerics(spec, config, context)
    if numerics.name != PUBLISHED:
        unused.add("row_rounding")
    used = [op for op in OPS if op not in unused]
    chosen = choose(spec, used, config, context, numerics.name)
    max_len = max_model_len(spec, config)
    # Some kernels multiply by weights as they are stored; others want them as they compute.
    kept = storage if chosen.multiplies_with(storage) else compute
    weights = weight_bytes(spec, kept.itemsize, chosen.stays_as_stored)
    staying = kept_formats(spec, chosen.stays_as_stored)
    budget = cache_budget(config, device, limits, weights, measured)
    guards = slot_bytes + sum(kind.block_bytes for kind in paged)
    canaries = CanaryPlan.of(config, device, guards)
    budget -= canaries.guard_bytes if canaries else 0
    slots = slot_plan(slot_bytes, config, size, budget, limits) if slot_bytes else None
    if slots:
        budget -= slots.num_slots * slots.slot_bytes
    groups = plan_groups(paged, config, limits, budget, max_len)
    return Plan(
        device=device,
        limits=limits,
        # Where a step takes microseconds, threads only wait for each other.
        threads=device.threads if weights >= SMALL_MODEL else 1,
        selections=chosen.ops,
        by_format=chosen.by_format,
        layers=chosen.layers,
        weight_dtype=kept,
        compute_dtype=compute,
        dtype_reason=reason,
        numerics=numerics,
        kinds=kinds,
        groups=groups,
        slots=slots,
        canaries=canaries,
        max_model_len=max_len,
        tiling=FIXED_TILING if config.batch_invariant else FREE_TILING,
        batch_invariant=config.batch_invariant,
        graphs=device.is_gpu and not config.enforce_eager and chosen.capture,
        weight_bytes=weights,
        kept_formats=tuple(form for form in chosen.by_format if form in staying),
        cache_bytes=sum(group.num_blocks * group.block_bytes for group in groups),
        workspace_bytes=measured.workspace if measured else None,
    )


def _find_kinds(
    spec: ModelSpec,
    config: EngineConfig,
    block_size: int,
    storage: torch.dtype,
    compute: torch.dtype,
) -> tuple[tuple[AnyKind, ...], list[AnyPagedKind]]:
    """What the layers keep between steps: all kinds, and those that are paged."""
    context = KindContext(
        config=config,
        compute=compute,
        weights=storage,
        block_size=block_size,
        tile=FIXED_TILING.size if config.batch_invariant else 0,
    )
    kinds = find_kinds(spec, context)
    paged = [kind for kind in kinds if isinstance(kind, PagedKind)]
    if not paged:
        raise UsageError(
            f"{spec.family}: accepted so far: models with latent or compressed attention in one "
            "layer or more"
        )
    return kinds, paged


def _op_context(
    config: EngineConfig, device: Device, compute: torch.dtype, kinds: Iterable[AnyKind]
) -> Context:
    """What implementations are to run with."""
    context = Context(
        dtype=compute,
        device=device.kind,
        compute_capability=device.compute_capability,
        batch_invariant=config.batch_invariant,
    )
    for kind in kinds:
        context = kind.tell(context)
    return context


SIXTEEN_BIT: dict[tuple[torch.dtype, str, bool], tuple[bool, str]] = {
    (torch.bfloat16, "avx512_bf16", True): (
        False,
        "our kernels read bfloat16 weights: 0.7 of oneDNN's bfloat16 time at 1 row, 1.1 to 1.5 at "
        "8, and whole models decode 1.2 to 1.9 times as fast",
    ),
    (torch.bfloat16, "avx512_bf16", False): (
        True,
        "oneDNN's bfloat16 products take about half the time of float32 at 1 to 256 rows",
    ),
}
"""On CPUs: (stored dtype, what multiplies in it, whether our kernels run) -> whether to compute in
it, and the measured reason. Whatever is not here is computed in float32: without avx512_bf16
oneDNN emulates bfloat16 at 2.2 to 2.8 times float32's time, or refuses. Not measured: CPUs with
amx_bf16, which have avx512_bf16 too and are treated as such; avx512_fp16 and amx_fp16. Decided by
features alone: a clock would decide otherwise when another program runs."""


def choose_compute_dtype(storage: torch.dtype, device: Device) -> tuple[torch.dtype, str]:
    """As stored on a GPU; on a CPU as the table says, all but products being faster in float32."""
    if storage == torch.float32 or device.is_gpu:
        return storage, "as stored"
    features = onednn_features()
    ours = runnable("linear", torch.float32)[0] == "native"
    for (dtype, feature, native), (narrow, reason) in SIXTEEN_BIT.items():
        if (dtype, native) == (storage, ours) and feature in features:
            return (storage if narrow else torch.float32), f"{feature}: {reason}"
    name = str(storage).removeprefix("torch.")
    return torch.float32, f"no {name} products here that were measured to be faster"
