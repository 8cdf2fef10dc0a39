"""A process that ends when its parent does, however that one ends.

Its standard input is a pipe that the parent holds open for as long as it lives; the system closes
that of a parent which was killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def when_the_parent_ends(act: Callable[[], None]) -> None:
    """Calls `act` in a thread of its own when the parent is gone."""
    pipe = os.dup(0)  # not inherited, unlike 0: what we start must not read from it
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        act()

    threading.Thread(target=watch, name="trueline-parent", daemon=True).start()
