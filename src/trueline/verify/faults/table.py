"""The table of seeded faults: known mistakes, put into the running package one at a time, and the
check that must go red for each.

A check that no fault can turn red is worthless; a fault that no check catches is a hole. Every
issue adds its rows.
"""

from trueline.verify.faults import Fault
from trueline.verify.faults.canaries import CANARY_FAULTS
from trueline.verify.faults.compressed import COMPRESSED_FAULTS
from trueline.verify.faults.compressed_ops import COMPRESSED_OP_FAULTS
from trueline.verify.faults.drafts import DRAFT_FAULTS
from trueline.verify.faults.engine import ENGINE_FAULTS
from trueline.verify.faults.formats import FORMAT_FAULTS
from trueline.verify.faults.gpu import GPU_FAULTS
from trueline.verify.faults.index_cache import INDEX_FAULTS
from trueline.verify.faults.indexer import INDEXER_FAULTS
from trueline.verify.faults.latent_cache import LATENT_FAULTS
from trueline.verify.faults.ling import LING_FAULTS
from trueline.verify.faults.numerics import NUMERICS_FAULTS
from trueline.verify.faults.published import PUBLISHED_FAULTS
from trueline.verify.faults.rank_steps import RANK_STEP_FAULTS
from trueline.verify.faults.rank_weights import RANK_WEIGHT_FAULTS
from trueline.verify.faults.ranks import RANK_FAULTS
from trueline.verify.faults.reference import REFERENCE_FAULTS
from trueline.verify.faults.selection import SELECTION_FAULTS
from trueline.verify.faults.spec import SPEC_FAULTS
from trueline.verify.faults.states import STATE_FAULTS
from trueline.verify.faults.stories import STORY_FAULTS
from trueline.verify.faults.v4 import V4_FAULTS
from trueline.verify.faults.weights import WEIGHT_FAULTS

__all__ = ["FAULTS", "Fault"]

FAULTS: list[Fault] = [
    *REFERENCE_FAULTS,
    *SPEC_FAULTS,
    *WEIGHT_FAULTS,
    *FORMAT_FAULTS,
    *NUMERICS_FAULTS,
    *LING_FAULTS,
    *INDEXER_FAULTS,
    *ENGINE_FAULTS,
    *STATE_FAULTS,
    *RANK_FAULTS,
    *RANK_WEIGHT_FAULTS,
    *RANK_STEP_FAULTS,
    *INDEX_FAULTS,
    *LATENT_FAULTS,
    *SELECTION_FAULTS,
    *GPU_FAULTS,
    *DRAFT_FAULTS,
    *STORY_FAULTS,
    *V4_FAULTS,
    *COMPRESSED_FAULTS,
    *COMPRESSED_OP_FAULTS,
    *PUBLISHED_FAULTS,
    *CANARY_FAULTS,
]
