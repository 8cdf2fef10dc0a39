"""What is made of a check that failed: which op it is, found by putting other implementations in
its place, and a file that replays it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from trueline.config import EngineConfig
from trueline.errors import TruelineError, UsageError, described
from trueline.ops.registry import OPS
from trueline.reference import ENDS
from trueline.verify.replay.alone import AS_SCHEDULED, PartAlone
from trueline.verify.replay.file import HEAD, OpChecked, Recorded, write
from trueline.verify.replay.record import MOST_WEIGHTS, add_weights, dtype_name, record
from trueline.verify.report import Check, Place, Status
from trueline.verify.suite import compositions
from trueline.verify.suite.composition import Composition
from trueline.verify.suite.numbers import KINDS_OF_OPS, Numbers, replace_place
from trueline.verify.suite.ops import names_in, runs_here

MOST_SWAPS = 12
"""Other implementations tried for a place."""
MOST_IN_ALL = 1 << 30
"""Bytes of a run's replay files; beyond it they have no weights."""


@dataclass
class Failures:
    numbers: Numbers
    replay_dir: Path | None = None
    swapped: dict[tuple[int | None, str | None], dict[str, bool]] = field(default_factory=dict)
    """By layer and part, since the same one is wrong in many compositions: which other
    implementations make it right."""
    written: int = 0

    def explain(self, check: Check) -> None:
        """Completes the place and the evidence of a failing check, and writes its file."""
        if check.status not in (Status.FAILED, Status.ERROR):
            return
        try:
            recorded = record(self.numbers, check, self._composition(check), self._op(check))
            if recorded.header.half is not None:
                self._name_op(check, recorded)
            if self.replay_dir is not None:
                check.replay = str(self._write(check, recorded, self.replay_dir))
        except Exception as error:  # what is recorded is broken: that is what the check says
            check.evidence += f"; not recorded: {described(error)}"

    @cached_property
    def _compositions(self) -> list[Composition]:
        return list(compositions.compositions(self.numbers.session))

    def _composition(self, check: Check) -> Composition | None:
        group, _, name = check.id.partition("/")
        if group in ("layers", "logits"):
            return self._compositions[0]
        return next((each for each in self._compositions if each.name == name), None)

    def _op(self, check: Check) -> OpChecked | None:
        if check.group != "ops":
            return None
        compute = self.numbers.session.plan.compute_dtype
        return OpChecked(*names_in(check.id), dtype_name(compute))

    # -- which op ----------------------------------------------------------------------

    def _name_op(self, check: Check, recorded: Recorded) -> None:
        """Runs the part alone, and with one op after the other replaced."""
        place, half = check.place, recorded.header.half
        assert place is not None, "a recorded part has a place"
        assert half is not None
        session = self.numbers.session
        weights = ENDS if half.half == HEAD else half.layer
        part = PartAlone(recorded, session.model, session.definition, weights)
        config = recorded.header.engine_config(device=session.config.device)
        try:
            half.alone = next(part.run(config, (AS_SCHEDULED,))).wrong
        except UsageError as reason:
            check.evidence += f"; its ops were not told apart: {reason}"
            return
        if not half.alone:
            ranks = part.asked.ranks > 1 or session.in_processes
            where = "on one rank" if ranks else "when it runs alone on the same inputs"
            check.evidence += f"; right {where}"
            check.place = replace_place(place, op=None, implementation=None)
            return
        key = place.layer, place.part
        if key not in self.swapped:
            self.swapped[key] = dict(self._swap(part, config, place))
        self._say(check, place, self.swapped[key])

    def _say(self, check: Check, place: Place, swapped: dict[str, bool]) -> None:
        right = next((name for name, wrong in swapped.items() if not wrong), None)
        if right is not None:
            op = right.partition("=")[0]
            check.evidence += f"; right with {right}"
            check.place = replace_place(place, op=op, implementation=self._chosen(op))
        elif swapped:
            check.evidence += f"; no op of it: wrong with {', '.join(swapped)} too"
            check.place = replace_place(place, op=None, implementation=None)

    def _swap(
        self, part: PartAlone, config: EngineConfig, place: Place
    ) -> Iterator[tuple[str, bool]]:
        for op, name in islice(self._others(place), MOST_SWAPS):
            changed = replace(config, ops={**config.ops, op: name})
            try:
                verdict = next(part.run(changed, (AS_SCHEDULED,)))
            except TruelineError:  # it refuses these options
                continue
            yield f"{op}={name}", verdict.wrong
            if not verdict.wrong:
                return

    def _others(self, place: Place) -> Iterator[tuple[str, str]]:
        """One other implementation of each op of a part, the likely op first; its definition where
        that runs here."""
        session = self.numbers.session
        ops = dict.fromkeys((place.op, *KINDS_OF_OPS.get(place.part or "", ())))
        for op in ops:
            if op is None or op not in session.plan.selections:
                continue
            names = dict.fromkeys(("reference", *OPS[op]))
            for name in names:
                if name != self._chosen(op) and runs_here(session, op, name):
                    yield op, name
                    break

    def _chosen(self, op: str) -> str:
        return self.numbers.session.plan.selections[op].name

    # -- the file ----------------------------------------------------------------------

    def _write(self, check: Check, recorded: Recorded, directory: Path) -> Path:
        recorded.header.evidence, recorded.header.place = check.evidence, check.place
        session = self.numbers.session
        room = max(min(MOST_WEIGHTS, MOST_IN_ALL - self.written), 0)
        add_weights(recorded, session.model, session.definition.config, room)
        path = directory / (re.sub(r"[^\w=.]+", "-", check.id) + ".replay.safetensors")
        write(recorded, path)
        self.written += path.stat().st_size
        return path
