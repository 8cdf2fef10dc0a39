"""How far two engines' logprobs of the same tokens are apart, as a trainer's and a rollout
engine's: the figures that reinforcement learning watches, where in the sequence the difference
grows, and how much of it comes with other choices of experts or keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from trueline.errors import UsageError

Numbers = Any
"""A sequence of numbers or a tensor; several of them, or a tensor of two dims, for several
sequences."""
FACTOR_OF_TWO = math.log(2)
LEAST = 10
"""Tokens below which no drift is told."""


class TokenMismatch(msgspec.Struct, frozen=True):
    sequence: int
    position: int
    """Index into its sequence."""
    trainer: float
    rollout: float

    @property
    def difference(self) -> float:
        return self.trainer - self.rollout


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Of |difference| over the position: a line through all tokens, by least squares."""

    slope: float
    """Per 1,000 positions."""
    error: float
    """Its standard error, whatever the variance at each position (HC1)."""
    p: float
    """Two-sided, that a slope of zero would look like that."""
    early: float
    late: float
    """Mean |difference| in the first and in the last tenth of the positions."""

    @property
    def doubled(self) -> bool:
        return self.late > 2 * self.early


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """What goes with choices that differ. A token that has chosen alike may follow one that has
    not, and reads what that one has left in the cache: `untouched` have none at or before them."""

    differing: float
    """Share of tokens whose choices differ in some layer."""
    by_layer: list[float]
    kl_differing: float | None
    kl_same: float | None
    """k3 of those tokens and of the others; None: there are none."""
    untouched: float
    kl_untouched: float | None
    """What no choice explains."""
    explained: float
    """Of the sum of k3 over all tokens, what is at tokens that differ."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """With d = trainer − rollout, of tokens that the rollout engine has drawn."""

    sequences: int
    tokens: int
    kl_k1: float
    """mean(−d): unbiased for KL(rollout ‖ trainer), of any sign."""
    kl_k3: float
    """mean(exp(d) − 1 − d): unbiased too, never negative, of less variance."""
    token_mult_prob_error: float
    """mean(exp |d|): 1 is no difference."""
    mean_abs: float
    max_abs: float
    outlier: float
    outliers: float
    """Share of tokens with |d| above `outlier`."""
    drift: Drift | None
    worst: list[TokenMismatch]
    experts: Explained | None = None
    selected: Explained | None = None

    def alarms(self, *, kl: float = 0.015, mult_prob_error: float = 1.05) -> list[str]:
        """What is above the bars that RL teams use."""
        found = [
            f"{name} {value:.4g}, above {bar:g}"
            for name, value, bar in (
                ("KL (k3)", self.kl_k3, kl),
                ("token_mult_prob_error", self.token_mult_prob_error, mult_prob_error),
            )
            if not value <= bar
        ]
        drift = self.drift
        if drift is not None and drift.slope > 0 and drift.p < 0.001 and drift.doubled:
            found.append(f"|difference| grows from {drift.early:.3g} to {drift.late:.3g}")
        return found


def logprob_mismatch(
    trainer: Numbers,
    rollout: Numbers,
    *,
    mask: Numbers | None = None,
    experts: tuple[Numbers, Numbers] | None = None,
    selected: tuple[Numbers, Numbers] | None = None,
    outlier: float = FACTOR_OF_TWO,
    worst: int = 10,
) -> Mismatch:
    """The mismatch between two sets of logprobs of the same tokens, which `rollout` has drawn.

    `mask`: of the same shape; tokens where it is 0 do not count, but keep their positions.
    `experts` and `selected`: the choices of (trainer, rollout), [tokens, layers, chosen] for each
    sequence, of the position whose forward pass gave the token's logprob: the one before it. −1 is
    no choice, and their order does not matter. `outlier`: |difference| in nats above which a token
    is one, by default a factor of two in probability. `worst`: how many tokens are listed."""
    ours, theirs = _sequences("trainer", trainer), _sequences("rollout", rollout)
    _require_alike("trainer", ours, "rollout", theirs)
    counted = [torch.ones(len(each), dtype=torch.bool) for each in ours]
    if mask is not None:
        given = _sequences("mask", mask)
        _require_alike("trainer", ours, "mask", given)
        counted = [each != 0 for each in given]
    at = [each.nonzero()[:, 0] for each in counted]
    d = torch.cat([(a - b)[i] for a, b, i in zip(ours, theirs, at, strict=True)])
    if not len(d):
        raise UsageError("no token counts: accepted: one or more")
    _require_logprobs(ours, theirs, at)
    off, k3 = d.abs(), d.expm1() - d
    return Mismatch(
        sequences=len(ours),
        tokens=len(d),
        kl_k1=float(-d.mean()),
        kl_k3=float(k3.mean()),
        token_mult_prob_error=float(off.exp().mean()),
        mean_abs=float(off.mean()),
        max_abs=float(off.max()),
        outlier=outlier,
        outliers=float((off > outlier).double().mean()),
        drift=_drift(torch.cat(at).double(), off),
        worst=list(_worst(ours, theirs, at, off, worst)),
        experts=None if experts is None else _explained("experts", experts, ours, at, k3),
        selected=None if selected is None else _explained("selected", selected, ours, at, k3),
    )


def _sequences(what: str, given: Numbers, dims: int = 1) -> list[Tensor]:
    """Each in float64; choices, of more dims, as they are."""
    wide = torch.float64 if dims == 1 else torch.int64
    try:
        if isinstance(given, Tensor) or hasattr(given, "__array__"):
            whole = torch.as_tensor(given).detach().cpu().to(wide)
            found = [whole] if whole.dim() == dims else list(whole)
        else:
            rows = list(given)
            single = dims == 1 and (not rows or isinstance(rows[0], (int, float)))
            found = [torch.as_tensor(each).detach().cpu().to(wide)
                     for each in ([rows] if single else rows)]  # fmt: skip
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{what}: accepted: numbers of one or more sequences: {error}") from error
    if wrong := [each for each in found if each.dim() != dims]:
        raise UsageError(f"{what}: {list(wrong[0].shape)} for a sequence; accepted: {dims} dims")
    return found


def _require_alike(one: str, ours: list[Tensor], two: str, theirs: list[Tensor]) -> None:
    lengths = [[len(each) for each in every] for every in (ours, theirs)]
    if lengths[0] != lengths[1]:
        raise UsageError(
            f"{one} has sequences of {lengths[0]} tokens, {two} of {lengths[1]}; accepted: the same"
        )


def _require_logprobs(ours: list[Tensor], theirs: list[Tensor], at: list[Tensor]) -> None:
    for what, every in (("trainer", ours), ("rollout", theirs)):
        for number, (each, counted) in enumerate(zip(every, at, strict=True)):
            wrong = ~(each[counted].isfinite() & (each[counted] <= 1e-4))
            if bool(wrong.any()):
                p = int(counted[wrong.nonzero()[0, 0]])
                raise UsageError(
                    f"{what}: sequence {number}, position {p}: {float(each[p])}; accepted: "
                    "logprobs, finite and not above 0 (`mask` leaves tokens out)"
                )


def _drift(positions: Tensor, off: Tensor) -> Drift | None:
    centred = positions - positions.mean()
    spread = float(centred.square().sum())
    if len(off) < LEAST or spread == 0:
        return None
    slope = float((centred * off).sum()) / spread
    rest = off - off.mean() - slope * centred
    variance = float((centred * rest).square().sum()) / spread**2 * len(off) / (len(off) - 2)
    error = math.sqrt(variance)
    first, last = float(positions.min()), float(positions.max())
    tenth = (last - first) / 10
    p = math.erfc(abs(slope) / error / math.sqrt(2)) if error else float(slope == 0)
    return Drift(
        slope=1000 * slope,
        error=1000 * error,
        p=p,
        early=float(off[positions <= first + tenth].mean()),
        late=float(off[positions >= last - tenth].mean()),
    )


def _worst(
    ours: list[Tensor], theirs: list[Tensor], at: list[Tensor], off: Tensor, count: int
) -> Iterator[TokenMismatch]:
    sequences = torch.cat([torch.full((len(i),), n) for n, i in enumerate(at)]).tolist()
    positions = torch.cat(at).tolist()
    for i in off.argsort(descending=True, stable=True)[:count].tolist():
        n, p = sequences[i], positions[i]
        yield TokenMismatch(n, p, float(ours[n][p]), float(theirs[n][p]))


def _explained(
    what: str,
    choices: tuple[Numbers, Numbers],
    ours: list[Tensor],
    at: Sequence[Tensor],
    k3: Tensor,
) -> Explained:
    pair = [_choices(f"{what} of {who}", given, ours)
            for who, given in zip(("trainer", "rollout"), choices, strict=True)]  # fmt: skip
    layers: list[Tensor] = []
    own: list[Tensor] = []
    before: list[Tensor] = []
    for a, b, counted in zip(*pair, at, strict=True):
        if a.shape[1] != b.shape[1]:
            raise UsageError(f"{what}: {a.shape[1]} and {b.shape[1]} layers; accepted: the same")
        differs = _differ(a, b)
        any_layer = differs.any(-1)
        layers.append(differs[counted])
        own.append(any_layer[counted])
        before.append((any_layer.long().cumsum(0) > 0)[counted])
    differing, touched = torch.cat(own), torch.cat(before)
    total = float(k3.sum())
    return Explained(
        differing=float(differing.double().mean()),
        by_layer=torch.cat(layers).double().mean(0).tolist(),
        kl_differing=_mean(k3[differing]),
        kl_same=_mean(k3[~differing]),
        untouched=float((~touched).double().mean()),
        kl_untouched=_mean(k3[~touched]),
        explained=float(k3[differing].sum()) / total if total else 0.0,
    )


def _choices(what: str, given: Numbers, ours: list[Tensor]) -> list[Tensor]:
    found = _sequences(what, given, dims=3)
    _require_alike("trainer", ours, what, found)
    return found


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """[tokens, layers]: as sets, whose padding may be of any length."""
    width = max(a.shape[2], b.shape[2])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[2]), value=-1) for x in (a, b))
    return (a.sort(-1).values != b.sort(-1).values).any(-1)


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
