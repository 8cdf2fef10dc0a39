"""Quantised weights as the engine reads them, whole and cut inside of blocks and groups, against
the definition's own reading: an op that takes them as they are stored may never ask for their
numbers, while another implementation, a rank or another machine does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from trueline.reference import read_config
from trueline.reference.weights import load_weights, renamed
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.outcome import Outcome
from trueline.verify.suite.session import Session
from trueline.verify.weight_values import require_same
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.formats import Stored
from trueline.weights.formats.dense import DENSE, INTEGERS
from trueline.weights.ledger import Use, balance
from trueline.weights.load import Files
from trueline.weights.value import StoredPart, Weight

EACH = 2
"""Weights of a name, but for the numbers in it, that are compared: the first and the last."""


def check(session: Session) -> Outcome:
    checkpoint = open_checkpoint(session.model)
    if checkpoint is None:
        raise NotForced("there are no weights: config.json alone")
    uses = balance(checkpoint, session.spec).uses
    quantised = [use for use in uses if use.format not in (DENSE, INTEGERS)]
    if not quantised:
        raise NotForced("no weight is quantised")
    config = read_config(session.model, **session.config.facts)
    files, count = Files(), 0
    for use in _some(quantised):
        name = renamed(use.piece.source, config)
        values = [files.view(tensor) for tensor in use.tensors]
        stored: Stored = use.format.open(use.tensors, values)
        part = StoredPart(stored, use.format.label, (0, 0))
        ours = Weight(stored.shape, torch.float32, (part,))
        theirs = load_weights(
            session.model, config, torch.float32, part=(name.removesuffix("weight"),)
        )
        require_same(name, ours, theirs[name])
        files.release(use)
        count += 1
    return Outcome(f"{count} of {len(quantised)} quantised weights, whole and cut")


def _some(uses: list[Use]) -> Iterator[Use]:
    alike: dict[tuple[str, str], list[Use]] = {}
    for use in uses:
        name = re.sub(r"\.\d+\.", ".N.", use.piece.source)
        alike.setdefault((name, use.format.label), []).append(use)
    for several in alike.values():
        yield from several[:: max(len(several) - 1, 1)][:EACH]
