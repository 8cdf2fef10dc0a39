"""What no prompt shows: stored numbers and angles that both sides read, routes and choices of the
definition, each against a second reading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trueline.ops.capabilities import PUBLISHED
from trueline.reference import compressor, deepseek_v4, indexer, model
from trueline.reference import config as facts
from trueline.reference.functional import Pair
from trueline.verify.failed import CheckFailed
from trueline.verify.indexer import plain_largest, ties
from trueline.verify.report import Place
from trueline.verify.rounding import fp4_is_nearest
from trueline.verify.routing import routes_plainly
from trueline.verify.suite import stored_numbers
from trueline.verify.suite.outcome import Outcome, Todo, Wrong
from trueline.verify.suite.session import Session

ITSELF = "definition = itself"
ULPS = 4
"""Of a cosine: two libraries' float32 functions of the same angle."""


def checks(session: Session) -> Iterator[Todo]:
    """Beside what any prompt computes."""
    if session.spec.storage is not None:
        yield Todo(
            "weights/stored numbers",
            "ledger",
            "quantised weights, whole and cut inside of blocks and groups, read a second time",
            lambda: stored_numbers.check(session),
        )
    yield Todo(
        "definition/angles",
        "one-spec",
        "cos and sin of near and far positions, in the engine's tables and the definition's",
        lambda: _angles(session),
    )
    config = session.definition.config
    if config.n_routed_experts is not None:
        yield Todo(
            "definition/routing",
            ITSELF,
            "experts and weights of the definition, among ties, underflow and biases far below "
            "zero, against the rule in plain Python",
            lambda: Outcome(f"{routes_plainly(config)} tokens"),
        )
    if config.indexer is not None or config.v4 is not None:
        yield Todo(
            "definition/choices",
            ITSELF,
            "keys that the definition chooses among ties, against a sort in plain Python",
            lambda: _choices(session),
        )
    if session.definition.numerics == PUBLISHED:
        yield Todo(
            "definition/fp4",
            ITSELF,
            "numbers half-way between two codes of fp4, and beside them",
            _fp4,
        )


def _fp4() -> Outcome:
    fp4_is_nearest()
    return Outcome("of every two codes beside each other")


def _choices(session: Session) -> Outcome:
    count = 0
    for name, values in ties():
        for topk in (1, 7, len(values), len(values) + 3):
            found = _largest(session, values, topk).tolist()
            for t, row in enumerate(values):
                wanted = plain_largest(row, t, topk)
                if found[t] != wanted:
                    raise CheckFailed(
                        f"choices: {name}, {topk} of {len(values)}: token {t} has chosen "
                        f"{found[t]}, not {wanted}"
                    )
                count += 1
    return Outcome(f"{count} rows of scores")


def _largest(session: Session, values: Tensor, topk: int) -> Tensor:
    if session.definition.config.v4 is None:
        return indexer.largest(values, topk)
    seen = torch.ones_like(values, dtype=torch.bool).tril()
    return compressor.largest(values, seen, topk)


def _angles(session: Session) -> Outcome:
    last = session.plan.max_model_len - 1
    places = sorted({0, last, *(min(2**n + by, last) for n in range(1, 40) for by in (-1, 0))})
    at, ours = torch.tensor(places), session.angles(torch.tensor(places))
    theirs = [_definition(session, layer, at) for layer in range(len(ours))]
    wrong = {
        layer: told
        for layer, pair in enumerate(zip(ours, theirs, strict=True))
        if (told := _unlike(*pair, places))
    }
    if wrong:
        first = min(wrong)
        which = "all layers" if len(wrong) == len(ours) else f"{len(wrong)} layers"
        raise Wrong(
            f"angles: layer {first}: {wrong[first]}; wrong in {which}", Place(layer=first), []
        )
    rotating = sum(pair is not None for pair in ours)
    return Outcome(f"{rotating} layers at {len(places)} positions up to {last:,}")


def _unlike(ours: Pair | None, theirs: Pair | None, places: list[int]) -> str | None:
    if ours is None or theirs is None:
        return "one rotates, the other does not" if ours is not theirs else None
    for name, one, two in zip(("cos", "sin"), ours, theirs, strict=True):
        if one.shape != two.shape:
            return f"{2 * one.shape[-1]} channels rotate, the definition has {2 * two.shape[-1]}"
        accepted = ULPS * torch.finfo(torch.float32).eps * float(two.abs().amax())
        off = (one.double() - two.double()).abs().amax(-1)
        if not bool((off <= accepted).all()):
            worst = int(off.nan_to_num(torch.inf).argmax())
            return (
                f"position {places[worst]:,}: {name} differs by {off[worst]:.3g}, accepted "
                f"{accepted:.3g}"
            )
    return None


def _definition(session: Session, layer: int, at: Tensor) -> Pair | None:
    config = session.definition.config
    if config.v4 is not None:
        return deepseek_v4.rope_table(config, layer, at)
    if facts.layer_is_linear(config, layer):
        return model.linear_rope_table(config, at)
    return model.rope_table(config, at)
