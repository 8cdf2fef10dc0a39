"""What the caches really take, against what was planned and what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.cache.layout import KINDS, STORAGES
from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.inputs import Caches
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.plan.memory import latent_mixers, linear_mixers, own_indexers
from trueline.plan.plan import make_plan
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
    "index_cache_layout": [*KINDS],
}


def allocated(caches: Caches) -> int:
    """Every tensor of every store."""
    stores = (caches.latent, caches.states, caches.index)
    values = [value for store in stores if store is not None for value in vars(store).values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_caches_take_what_was_planned(family: str, write_config: Write) -> None:
    """With every way of storing them; and no more than there is, of which no block is left over."""
    spec = read_model(write_config(family_config(family)))
    if spec.not_runnable:
        pytest.skip(spec.not_runnable)
    options = COMMON | (STATES if linear_mixers(spec) else {})
    options |= INDEX if own_indexers(spec) else {}
    tried = 0
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        config = EngineConfig(**chosen, kv_cache_memory_bytes=BUDGET, max_num_seqs=10_000)
        try:
            plan = make_plan(spec, config, find_device("cpu"))
        except UsageError as error:
            assert any(name in str(error) for name in ("index", "block_size")), error
            continue
        caches = Caches(spec, plan)
        rows = caches.latent.rows
        spare = len(latent_mixers(spec)) * rows.shape[2] * rows.element_size()
        states = plan.state.num_slots * plan.state.slot_bytes if plan.state else 0
        block = plan.cache_bytes // plan.num_blocks
        # besides blocks and slots a row of zeros in each layer, for what is masked
        assert allocated(caches) == plan.cache_bytes + states + spare, chosen
        assert plan.cache_bytes + states <= BUDGET, chosen
        assert plan.cache_bytes + states + block > BUDGET, "there is room for one more"
        tried += 1
    assert tried > len(COMMON["block_size"])
