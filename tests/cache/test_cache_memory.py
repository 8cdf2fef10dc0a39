"""What the caches really take, against what was planned and what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.cache.index import IndexStore
from trueline.cache.kinds.entries import Entries
from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.window import Window
from trueline.cache.layout import INDEX_LAYOUTS, STORAGES
from trueline.cache.store import LatentStore
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.caches import Caches
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.plan import make_plan
from trueline.spec.mixer import LightningSpec, MLASpec
from trueline.tiny.configs import FAMILIES, family_config

Write = Callable[[Mapping[str, Any]], Path]
BUDGET = 3_000_000
COMMON: dict[str, list[Any]] = {"batch_invariant": [False, True], "block_size": [1, 16, 48]}
STATES: dict[str, list[Any]] = {
    "mamba_cache_dtype": ["float32", "bfloat16", "float16", "auto"],
    "num_state_slots": [None, 7],
}
INDEX: dict[str, list[Any]] = {
    "index_cache_dtype": [*STORAGES, "auto"],
    "index_cache_layout": [*INDEX_LAYOUTS],
}


def allocated(caches: Caches) -> int:
    """Every tensor of every store."""
    return sum(map(_bytes, (*caches.paged.values(), *caches.slotted.values())))


def _bytes(store: object) -> int:
    """Also of a store inside of another."""
    values = [
        v for v in vars(store).values() if isinstance(v, torch.Tensor | LatentStore | IndexStore)
    ]
    return sum(v.nbytes if isinstance(v, torch.Tensor) else _bytes(v) for v in values)


@pytest.mark.parametrize("batch_invariant", COMMON["batch_invariant"])
@pytest.mark.parametrize("block_size", COMMON["block_size"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_caches_of_compressed_attention(
    block_size: int, batch_invariant: bool, kv_cache_dtype: str, write_config: Write
) -> None:
    """Windows, tails and entries, in groups of their own."""
    spec = read_model(write_config(family_config("deepseek_v4")))
    budget = 20 * BUDGET
    config = EngineConfig(
        block_size=block_size, batch_invariant=batch_invariant, max_num_seqs=5,
        max_num_batched_tokens=100, kv_cache_memory_bytes=budget, kv_cache_dtype=kv_cache_dtype,
        canary_interval=int(batch_invariant),
    )  # fmt: skip
    plan = make_plan(spec, config, find_device("cpu"))
    caches = Caches(plan, len(spec.layers))
    rows = [kind for kind in plan.kinds if isinstance(kind, Window | Entries)]
    zeros = sum(len(kind.layers) * kind.layout.row_bytes(kind.dtype.itemsize) for kind in rows)
    guards = plan.canaries.guard_bytes if plan.canaries else 0
    assert guards == sum(group.block_bytes for group in plan.groups) * batch_invariant
    assert allocated(caches) == plan.cache_bytes + guards + zeros
    assert plan.cache_bytes + guards <= budget


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v4"])
def test_the_caches_take_what_was_planned(family: str, write_config: Write) -> None:
    """With every way of storing them; and no more than there is, of which no block is left over."""
    spec = read_model(write_config(family_config(family)))
    if spec.not_runnable:
        pytest.skip(spec.not_runnable)
    mixers = [layer.mixer for layer in spec.layers]
    latent = [mixer for mixer in mixers if isinstance(mixer, MLASpec)]
    options = COMMON | (STATES if any(isinstance(m, LightningSpec) for m in mixers) else {})
    options |= INDEX if any(mixer.indexer for mixer in latent) else {}
    tried = 0
    for number, values in enumerate(product(*options.values())):
        chosen = dict(zip(options, values, strict=True))
        chosen["kv_cache_dtype"] = "fp8" if number // 5 % 2 else "auto"
        chosen["canary_interval"] = number % 2
        config = EngineConfig(**chosen, kv_cache_memory_bytes=BUDGET, max_num_seqs=10_000)
        try:
            plan = make_plan(spec, config, find_device("cpu"))
        except UsageError as error:
            assert any(name in str(error) for name in ("index", "block_size")), error
            continue
        caches = Caches(plan, len(spec.layers))
        rows = caches.first(Latent).rows
        spare = len(latent) * rows.shape[1] * rows.element_size()
        states = plan.slots.num_slots * plan.slots.slot_bytes if plan.slots else 0
        block = plan.cache_bytes // plan.num_blocks
        slot = plan.slots.slot_bytes if plan.slots else 0
        guards = (block + slot) * (number % 2)
        # besides blocks and slots a row of zeros in each layer, for what is masked
        assert allocated(caches) == plan.cache_bytes + states + guards + spare, chosen
        assert plan.cache_bytes + states + guards <= BUDGET, chosen
        assert plan.cache_bytes + states + guards + block > BUDGET, "there is room for one more"
        tried += 1
    assert tried > len(COMMON["block_size"])
