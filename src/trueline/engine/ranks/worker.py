"""A rank other than 0: joins, loads its part of the model, and does what rank 0 tells it until that
one is gone."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trueline.engine.ranks.orders import WorkerStart, decode
from trueline.errors import TruelineError, described
from trueline.utils.parent import when_the_parent_ends

if TYPE_CHECKING:
    from torch import Tensor

    from trueline.engine.batch import Batch
    from trueline.engine.results import StepHandle
    from trueline.engine.runner import Runner
    from trueline.parallel.group import RankGroup


def main(text: str) -> int:
    # what signals mean is rank 0's to decide
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    when_the_parent_ends(lambda: os._exit(1))
    return run(msgspec.json.decode(text, type=WorkerStart))


def run(start: WorkerStart) -> int:
    """Joins and serves. Returns the exit code."""
    from trueline.engine.ranks.join import join
    from trueline.parallel.group import RankFailed

    try:
        group = join(start)
    except RankFailed as error:
        return _say(start.rank, str(error))
    return serve(start, group)


def serve(start: WorkerStart, group: RankGroup) -> int:
    """Returns the exit code."""
    from trueline.engine.loading import load_rank

    try:
        work(group, load_rank(Path(start.model), start.config, group).runner)
    except Exception as error:
        words = str(error) if isinstance(error, TruelineError) else described(error)
        # the first that fails is the cause; others fail because it is gone
        return _say(start.rank, words) if group.report(words) else 1
    return 0


def _say(rank: int, words: str) -> int:
    print(f"trueline: rank {rank}: {words}", file=sys.stderr, flush=True)
    return 1


def _not_looked_at(batch: Batch, logits: Tensor) -> None:
    """Rank 0 has them too."""


def work(group: RankGroup, runner: Runner) -> None:
    launched: deque[StepHandle] = deque()
    while True:
        order = decode(group.control.hear())
        if order.step is None:
            while launched:
                launched.popleft().result()
            return runner.last_check()
        for admission in order.admissions:
            runner.admit(admission)
        if order.unowned is not None:
            runner.poison(order.unowned)
        runner.probe = _not_looked_at if order.probed else None
        group.journal.next_step()
        launched.append(runner.launch(order.step))
        while len(launched) > 1:  # as far behind as rank 0 may be
            launched.popleft().result()
