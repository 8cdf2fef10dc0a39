"""The definition, one row and one token at a time, in Python's own numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trueline.ops.sampling import (
    GOLDEN,
    IMPLEMENTATIONS,
    MULTIPLIERS,
    SHIFTS,
    Entries,
    Sampled,
    SamplingRows,
    Scored,
)

capabilities = IMPLEMENTATIONS["reference"]

WORD = 2**64


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    num_rows, vocab_size = logits.shape
    num_top = min(rows.num_top, vocab_size)
    tokens = torch.zeros(num_rows, dtype=torch.int64)
    bad = torch.zeros(num_rows, dtype=torch.bool)
    scored = _nothing(num_rows, num_top)
    for i in range(num_rows):
        token = choose(logits[i].double().tolist(), rows, i)
        bad[i] = token is None
        tokens[i] = token or 0
        if i in rows.asked and token is not None:
            found = score(logits[i : i + 1], tokens[i : i + 1], num_top)
            scored.logprobs[i] = found.logprobs[0]
            scored.ranks[i] = found.ranks[0]
            scored.top_ids[i] = found.top_ids[0]
            scored.top_logprobs[i] = found.top_logprobs[0]
    columns = (scored.logprobs, scored.ranks, scored.top_ids, scored.top_logprobs)
    return Sampled(*columns, tokens=tokens, bad=bad)


def score(logits: Tensor, tokens: Tensor, num_top: int) -> Scored:
    num_top = min(num_top, logits.shape[1])
    scored = _nothing(len(logits), num_top)
    for i, token in enumerate(tokens.tolist()):
        x = logits[i].double().tolist()
        if is_bad(x):
            continue
        best = max(x)
        total = best + math.log(math.fsum(math.exp(value - best) for value in x))
        order = sorted(range(len(x)), key=lambda t: (-x[t], t))[:num_top]
        scored.logprobs[i] = x[token] - total
        scored.ranks[i] = 1 + sum(value > x[token] for value in x)
        scored.top_ids[i] = torch.tensor(order, dtype=torch.int64)
        scored.top_logprobs[i] = torch.tensor([x[t] - total for t in order])
    return scored


def choose(x: list[float], rows: SamplingRows, i: int) -> int | None:
    if is_bad(x):
        return None
    x = edit(x, rows, i)
    if is_bad(x):
        return None
    temperature = rows.temperature[i].item()
    order = sorted(range(len(x)), key=lambda t: (-x[t], t))
    if temperature == 0:
        return order[0]
    best = x[order[0]]
    scaled = [(value - best) / temperature for value in x]
    kept = keep(order, [math.exp(value) for value in scaled], rows, i)
    seed, position = int(rows.seed[i]), int(rows.position[i])
    return max(kept, key=lambda t: scaled[t] + noise(seed, position, t))


def edit(x: list[float], rows: SamplingRows, i: int) -> list[float]:
    x = [value if _unmasked(rows, i, t) else -math.inf for t, value in enumerate(x)]
    allowed = _of_row(rows.allowed, i)
    if allowed:
        x = [value if t in allowed else -math.inf for t, value in enumerate(x)]
    banned = _of_row(rows.banned, i)
    x = [-math.inf if t in banned else value for t, value in enumerate(x)]
    for t, value in _of_row(rows.bias, i).items():
        x[t] += value
    for t, count in _of_row(rows.seen, i).items():
        repetition = rows.repetition[i].item()
        x[t] = x[t] / repetition if x[t] > 0 else x[t] * repetition
        x[t] -= rows.frequency[i].item() * count
        x[t] -= rows.presence[i].item() if count > 0 else 0
    return x


def _unmasked(rows: SamplingRows, i: int, token: int) -> bool:
    if rows.mask is None or i not in rows.mask.rows:
        return True
    word = int(rows.mask.words[rows.mask.rows.index(i), token // 32])
    return (word >> token % 32) % 2 == 1


def keep(order: list[int], weights: list[float], rows: SamplingRows, i: int) -> list[int]:
    """`weights` are in proportion to the probabilities; the largest is 1."""
    top_k, top_p, min_p = int(rows.top_k[i]), rows.top_p[i].item(), rows.min_p[i].item()
    left = [t for t in order if weights[t] >= min_p]
    left = left[:top_k] if top_k else left
    if top_p == 1:
        return left
    total = math.fsum(weights[t] for t in left)
    kept: list[int] = []
    before = 0.0
    for t in left:
        if before >= top_p * total:
            break
        kept.append(t)
        before += weights[t]
    return kept


def is_bad(x: list[float]) -> bool:
    return any(math.isnan(v) or v == math.inf for v in x) or all(v == -math.inf for v in x)


def noise(seed: int, position: int, token: int) -> float:
    key = mix(mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    k = mix(key + (token + 1) * GOLDEN) >> 12
    return -math.log(-math.log((2 * k + 1) / 2**53))


def mix(z: int) -> int:
    z %= WORD
    z = (z ^ (z >> SHIFTS[0])) * MULTIPLIERS[0] % WORD
    z = (z ^ (z >> SHIFTS[1])) * MULTIPLIERS[1] % WORD
    return z ^ (z >> SHIFTS[2])


def _of_row(entries: Entries | None, i: int) -> dict[int, float]:
    if entries is None:
        return {}
    listed = zip(entries.row.tolist(), entries.token.tolist(), entries.value.tolist(), strict=True)
    return {token: value for row, token, value in listed if row == i}


def _nothing(num_rows: int, num_top: int) -> Scored:
    return Scored(
        torch.full((num_rows,), math.nan),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.full((num_rows, num_top), -1),
        torch.full((num_rows, num_top), math.nan),
    )
