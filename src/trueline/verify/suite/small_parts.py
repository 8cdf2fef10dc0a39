"""What long contexts bring about, in short ones: rows that are computed in several parts, because
all of them would take too much memory at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from trueline.cache.kinds import index_keys
from trueline.engine import runner
from trueline.ops.compress import cpu as compress
from trueline.ops.index_scores import cpu as index_scores
from trueline.ops.lightning import cpu as lightning
from trueline.ops.mla_prefill import cpu as mla_prefill
from trueline.ops.sampling import cpu as sampling
from trueline.ops.sink_attention import cpu as sink_attention

SIZES: Mapping[tuple[ModuleType, str], int] = {
    (mla_prefill, "KEYS"): 24,
    (mla_prefill, "SCORES"): 1 << 10,
    (sink_attention, "SCORES"): 1 << 10,
    (lightning, "SPAN"): 1,
    (compress, "AT_ONCE"): 1,
    (index_scores, "PRODUCTS"): 1 << 8,
    (index_keys, "SCORES_AT_A_TIME"): 1 << 8,
    (runner, "SCORED_ROWS"): 5,
    (sampling, "ROWS_AT_A_TIME"): 3,
    (sampling, "NUM_LEADING"): 8,
}
"""Numbers, rows or tokens of a part, where there are usually hundreds to millions."""


@contextmanager
def small_parts() -> Iterator[None]:
    usual = {(module, name): getattr(module, name) for module, name in SIZES}
    try:
        for (module, name), size in SIZES.items():
            setattr(module, name, size)
        yield
    finally:
        for (module, name), size in usual.items():
            setattr(module, name, size)
