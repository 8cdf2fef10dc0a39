"""The next token of every row: `sample(logits [B, V], rows) -> Sampled`, and the logprobs of tokens
that are given: `score(logits [N, V], tokens [N], num_top) -> Scored`. Neither changes its input;
logits may be strided and of any float dtype.

**Order.** Logprobs come from the raw logits, before all else. Then: the mask of a grammar, allowed
tokens, banned tokens, bias, penalties (repetition over prompt and output, then frequency and
presence over output), temperature, min-p, top-k, top-p, and the draw. All of it in float64: it is
cheap beside a forward pass, and leaves no room for rounding to choose tokens.

**Which tokens stay.** Tokens are ordered by logit, equal ones by id, the lower first. Greedy takes
the first of that order. min-p keeps those at least `min_p` times as likely as the likeliest; top-k
keeps exactly the first k; top-p keeps a token if the mass of those before it, among what top-k and
min-p left, is less than `top_p`. So at least one token always stays, and top-k 1 is greedy.

**The draw** is Gumbel-max: of the tokens that stay, the one with the largest logit / temperature +
noise. The noise is a function of (seed, position, token) alone: the batch, the row's place in it,
its neighbours, the device, and tokens that were filtered out have no part in it. With 64-bit
integers that wrap around, and splitmix64's finaliser as `mix`:

    key   = mix(mix(seed + G) + (position + 1) * G)            G = 0x9E3779B97F4A7C15
    k     = mix(key + (token + 1) * G) >> 12                   unsigned: 52 bits
    noise = -log(-log((2k + 1) / 2**53))                       float64

Float64, so that the last bit of a device's log decides about once in 10**14 draws.

**Bad rows.** A row whose logits have NaN or +Inf, or are all -Inf, or that has no token left which
it may take, is `bad`: its token is 0, so that it can be fed on without harm, and its logprobs are
NaN. It changes nothing for the others.

**On a GPU** everything stays on the device, and `draw(logits, temperature, seed, position)` ->
tokens, bad is what a captured graph holds: rows that nothing edits and that have no top-k or top-p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trueline.ops.capabilities import CPU, FLOATS, Capabilities
from trueline.ops.sampling.rows import (
    Entries,
    SamplingRows,
    SamplingState,
    TokenMask,
    build_rows,
)

__all__ = [
    "Entries",
    "Sampled",
    "SamplingRows",
    "SamplingState",
    "Scored",
    "TokenMask",
    "build_rows",
]

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


@dataclass(frozen=True, slots=True)
class Scored:
    logprobs: Tensor  # [N] float32, of the raw distribution
    ranks: Tensor  # [N] int64; 1 is the likeliest, equal ones share the best rank
    top_ids: Tensor  # [N, K] int64, the likeliest first
    top_logprobs: Tensor  # [N, K] float32


@dataclass(frozen=True, slots=True)
class Sampled(Scored):
    """Scored for all rows; those that did not ask have NaN, rank 0, and ids -1."""

    tokens: Tensor  # [B] int64
    bad: Tensor  # [B] bool


class Sampling(Protocol):
    capabilities: Capabilities

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled: ...

    def score(self, logits: Tensor, tokens: Tensor, num_top: int) -> Scored: ...


class CapturedSampling(Sampling, Protocol):
    """What an implementation that a graph may hold has too."""

    def draw(
        self, logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]: ...


IMPLEMENTATIONS = {
    "cpu": CPU,
    "reference": CPU,
    "triton": Capabilities(devices=("cuda",), dtypes=FLOATS, batch_invariant=True, capture=True),
}
