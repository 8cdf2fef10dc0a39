"""Linear attention from outside: the op `lightning` in plain torch, and a layer that counts.

The op is this module: its `capabilities`, and the functions that the Protocol in
trueline/ops/lightning asks for. A chunk is one product, and not the tiles that ours works in: with
D[t, j] = λ^(t-j) for j <= t, else 0,

    out = (q kᵀ ∘ D) v + λ^(t+1) q S,

where S is the state before the chunk. Decode is a chunk of one token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trueline.cache.kinds import LayerViews
from trueline.cache.state import StateView
from trueline.layers.context import Rope, StepInput
from trueline.layers.lightning import Lightning
from trueline.ops.capabilities import Capabilities
from trueline.ops.lightning import PrefillParts, StateRow, StateTable

api_version = 5
# Not batch-invariant: a chunk is one product, so its bits depend on where the chunk ends. In that
# mode the plan takes another implementation, and tells the user why.
capabilities = Capabilities(devices=("cpu",))


# -- the op ----------------------------------------------------------------------------


def prepare(rows: list[StateRow] | StateTable) -> list[StateRow]:
    """Called once a step; what it returns is given to every layer's `decode`."""
    assert not isinstance(rows, StateTable), "tables are for GPUs"
    return rows


def prepare_prefill(parts: PrefillParts) -> PrefillParts:
    """The same for `prefill`."""
    return parts


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: list[StateRow],
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    # All sources before any slot is written: a row may read what another one overwrites.
    states = [read(view, row) for row in prepared]
    out = [
        chunk(q[i : i + 1], k[i : i + 1], v[i : i + 1], view, row, states[i], slopes)
        for i, row in enumerate(prepared)
    ]
    return (scale * torch.cat(out)).to(q.dtype)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: StateView,
    prepared: PrefillParts,
    *,
    slopes: Tensor,
    scale: float,
) -> Tensor:
    """Only the tokens of the rows are written."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for at, row in prepared:
        out[at] = scale * chunk(q[at], k[at], v[at], view, row, read(view, row), slopes)
    return out


def read(view: StateView, row: StateRow) -> Tensor:
    """The state before the row's first token. None means zeros, whatever any slot holds."""
    if row.source is None:
        return torch.zeros_like(view.state[0], dtype=torch.float64)
    return view.state[row.source].double()


def chunk(
    q: Tensor, k: Tensor, v: Tensor, view: StateView, row: StateRow, state: Tensor, slopes: Tensor
) -> Tensor:
    """In float64: thousands of roundings of a weak decay would add up. q, k, v [n, heads, d]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))  # [heads, n, d]
    at = torch.arange(q.shape[1])
    lag = at[:, None] - at
    weights = decay(slopes, lag).masked_fill(lag < 0, 0)
    out = (q @ k.mT * weights) @ v + decay(slopes, at + 1)[..., None] * (q @ state)
    for position, slot in row.writes(q.shape[1]):
        n = position - row.start
        faded = k[:, :n] * decay(slopes, n - 1 - at[:n])[..., None]
        view.state[slot] = decay(slopes, torch.tensor([n]))[..., None] * state + faded.mT @ v[:, :n]
    return out.transpose(0, 1)


def decay(slopes: Tensor, tokens: Tensor) -> Tensor:
    """λ^tokens of every head. From its own exponent each, never by division: nothing overflows."""
    exponents = -slopes.double().view(-1, *[1] * tokens.ndim) * tokens.clamp_min(0)
    return exponents.exp()


# -- the layer -------------------------------------------------------------------------


class CountingLightning(Lightning):
    """Our layer, and how many tokens went through it."""

    api_version = 5

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tokens = 0

    def forward(self, x: Tensor, step: StepInput, views: LayerViews, rope: Rope) -> Tensor:
        self.tokens += len(x)
        return super().forward(x, step, views, rope)
