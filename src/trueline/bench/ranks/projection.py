"""From a few layers of one rank to the whole model on all ranks: arithmetic, nothing is measured
here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueline.utils.json_types import JSON


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The collectives of a step: how many, and the bytes of their results."""

    all_reduces: float = 0.0
    reduced_bytes: float = 0.0
    all_gathers: float = 0.0
    gathered_bytes: float = 0.0

    def plus(self, other: Exchanges, times: float = 1.0) -> Exchanges:
        return Exchanges(
            self.all_reduces + times * other.all_reduces,
            self.reduced_bytes + times * other.reduced_bytes,
            self.all_gathers + times * other.all_gathers,
            self.gathered_bytes + times * other.gathered_bytes,
        )


@dataclass(frozen=True, slots=True)
class Interconnect:
    ranks: int
    latency: float
    """Seconds of a collective of a few bytes."""
    bandwidth: float
    """Bytes a second: bus bandwidth, as nccl-tests defines it."""

    def seconds(self, exchanges: Exchanges) -> float:
        """One collective after the other, none of them while the rank computes."""
        if self.ranks == 1:
            return 0.0
        # What a ring passes over each link: an all-reduce is a reduce-scatter and an all-gather.
        passed = 2 * exchanges.reduced_bytes + exchanges.gathered_bytes
        passed *= (self.ranks - 1) / self.ranks
        calls = exchanges.all_reduces + exchanges.all_gathers
        return calls * self.latency + passed / self.bandwidth


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of a step on one rank."""

    compute: float
    """Seconds."""
    exchanges: Exchanges


@dataclass(frozen=True, slots=True)
class Deeper:
    """The same step with more layers of one kind."""

    cost: StepCost
    more: int
    """Layers of the kind that the shallow model does not have."""
    missing: int
    """Layers of the kind that the whole model has and the shallow one has not."""


def whole_cost(shallow: StepCost, deeper: Sequence[Deeper]) -> StepCost:
    """Of the whole model. `shallow`: of a model with one layer of each kind, so that embedding,
    head and sampling count once."""
    compute, exchanges = shallow.compute, shallow.exchanges
    for each in deeper:
        times = each.missing / each.more
        # clocks are noisy where layers are tiny; none takes less than nothing
        compute += times * max(each.cost.compute - shallow.compute, 0.0)
        grown = each.cost.exchanges.plus(shallow.exchanges, -1.0)
        exchanges = exchanges.plus(grown, times)
    return StepCost(compute, exchanges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A step of the whole model on all ranks."""

    requests: int
    tokens: int
    """Of all requests."""
    compute: float
    """Seconds, and so is the next."""
    exchange: float
    exchanges: Exchanges
    roofline: float | None = None
    """Seconds that the memory of an H200 takes for a rank's bytes; None elsewhere."""

    @property
    def step(self) -> float:
        return self.compute + self.exchange

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step

    def as_json(self) -> JSON:
        sums, gathers = self.exchanges.all_reduces, self.exchanges.all_gathers
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "step_ms": 1e3 * self.step,
            "compute_ms": 1e3 * self.compute,
            "exchange_ms": 1e3 * self.exchange,
            "roofline_ms": None if self.roofline is None else 1e3 * self.roofline,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_and_request": self.tokens_per_s / self.requests,
            "all_reduces": sums,
            "reduced_bytes": self.exchanges.reduced_bytes,
            "all_gathers": gathers,
            "gathered_bytes": self.exchanges.gathered_bytes,
        }


def projected(
    requests: int,
    tokens: int,
    cost: StepCost,
    interconnect: Interconnect,
    roofline: float | None = None,
) -> Projected:
    return Projected(
        requests=requests,
        tokens=tokens,
        compute=cost.compute,
        exchange=interconnect.seconds(cost.exchanges),
        exchanges=cost.exchanges,
        roofline=roofline,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    weights: int
    """As packed."""
    token: int
    """What a token keeps in the cache, all layers together."""
    sequence: int
    """What a sequence keeps beside it: recurrent states."""
    budget: int
    """For the cache."""

    @property
    def fits(self) -> bool:
        return self.budget > 0

    def tokens(self, sequences: int) -> int:
        """That fit, of so many sequences at once."""
        return max(self.budget - sequences * self.sequence, 0) // self.token

    def as_json(self, sequences: int) -> JSON:
        return {
            "weight_bytes": self.weights,
            "cache_bytes_per_token": self.token,
            "state_bytes_per_sequence": self.sequence,
            "cache_budget_bytes": self.budget,
            "tokens_that_fit": self.tokens(sequences),
        }
