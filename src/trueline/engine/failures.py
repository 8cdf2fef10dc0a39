"""What follows from an exception in a step: a line in the log, and whether the engine goes on."""

from __future__ import annotations

import logging
import traceback

from trueline.device import recover
from trueline.errors import EngineBroken, described

MOST_IN_A_ROW = 8
"""Steps that fail one after the other: more are no accident."""

logger = logging.getLogger(__name__)


class Failures:
    """Failed steps since the last one that did not fail."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def none(self) -> None:
        self.in_a_row = 0

    def add(self, error: BaseException, num_requests: int) -> None:
        """EngineBroken where the engine cannot go on after it."""
        if not isinstance(error, KeyboardInterrupt):  # it is no fault, and the caller has it
            message = f"a step failed, and with it {num_requests} requests"
            logger.error(message, exc_info=(type(error), error, error.__traceback__))
        # a traceback keeps what its functions had in hand: memory, where that was what lacked
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, EngineBroken):  # a rank is gone
            raise error
        self.in_a_row += num_requests > 0  # else it failed after, and with, the one before
        if self.in_a_row > MOST_IN_A_ROW:
            raise EngineBroken(
                f"{self.in_a_row} steps in a row have failed, the last with {described(error)}"
            )
        try:
            recover()
        except Exception as lost:
            raise EngineBroken(f"{described(error)}; the GPU is lost: {described(lost)}") from lost
