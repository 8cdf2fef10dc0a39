"""Python's garbage collector looks at every object that there is whenever enough new ones have
stayed: a tenth of a second in a process with PyTorch, a hundred tokens apart, while the GPU waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FEW = 1000
"""Objects that are out of sight from the start: 375 in CPython 3.12, none in 3.11."""


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now is not looked at until the end. Where somebody has said so for good, it stays
    so."""
    ours = gc.get_freeze_count() < FEW
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
