"""The table of seeded faults: known mistakes, put into the running package one at a time, and the
check that must go red for each.

A check that no fault can turn red is worthless; a fault that no check catches is a hole. Every
issue adds its rows.
"""

from trueline.verify.seed import Fault
from trueline.verify.seed.engine import ENGINE_FAULTS
from trueline.verify.seed.gpu import GPU_FAULTS
from trueline.verify.seed.index_cache import INDEX_FAULTS
from trueline.verify.seed.indexer import INDEXER_FAULTS
from trueline.verify.seed.ling import LING_FAULTS
from trueline.verify.seed.ranks import RANK_FAULTS
from trueline.verify.seed.reference import REFERENCE_FAULTS
from trueline.verify.seed.selection import SELECTION_FAULTS
from trueline.verify.seed.spec import SPEC_FAULTS
from trueline.verify.seed.states import STATE_FAULTS
from trueline.verify.seed.weights import WEIGHT_FAULTS

__all__ = ["FAULTS", "Fault"]

FAULTS: list[Fault] = [
    *REFERENCE_FAULTS,
    *SPEC_FAULTS,
    *WEIGHT_FAULTS,
    *LING_FAULTS,
    *INDEXER_FAULTS,
    *ENGINE_FAULTS,
    *STATE_FAULTS,
    *RANK_FAULTS,
    *INDEX_FAULTS,
    *SELECTION_FAULTS,
    *GPU_FAULTS,
]
