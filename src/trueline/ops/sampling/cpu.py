"""In torch, batched over rows. A row does not depend on the others: only reductions whose bits do
not depend on the number of rows are used.

Runs on any device; on a GPU, what is not plain goes through here. The host waits for the device
only where the size of a nucleus decides what is to be sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trueline.device import send
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

capabilities = IMPLEMENTATIONS["cpu"]

# How many of the likeliest tokens to look at before sorting a whole vocabulary for top-p. It
# decides about time alone.
NUM_LEADING = 1024
# How many rows' float64 logprobs are held at a time.
ROWS_AT_A_TIME = 16


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    # a maximum is NaN or +Inf if anything is, and -Inf only if all is; of equal ones the first
    best, tokens = logits.max(dim=-1)
    bad = ~best.isfinite()
    masked = rows.mask.rows if rows.mask else ()
    retake(logits, rows, sorted({*rows.edited, *masked, *rows.drawn}), tokens, bad)
    tokens.masked_fill_(bad, 0)
    return score_asked(logits, tokens, bad, rows, score)


def retake(
    logits: Tensor, rows: SamplingRows, touched: list[int], tokens: Tensor, bad: Tensor
) -> None:
    """Edit and draw the rows `touched`, and put what comes out into `tokens` and `bad`, which
    know the raw logits already."""
    if not touched:
        return
    index = _index(touched, logits)
    raw = logits if len(touched) == len(logits) else logits[index]
    x = raw.to(torch.float64, copy=True)
    x.masked_fill_(bad[index, None], 0.0)
    places = torch.zeros_like(tokens)
    places[index] = torch.arange(len(touched), device=logits.device)
    if mask := rows.mask and rows.mask.only(set(touched)):
        x[places[mask.row]] = masked(x[places[mask.row]], mask.words)
    _edit(x, rows, places)
    best, chosen = x.max(dim=-1)
    hopeless = ~best.isfinite()
    x.masked_fill_(hopeless[:, None], 0.0)
    ours = set(touched)
    if drawn := [row for row in rows.drawn if row in ours]:
        at = places[_index(drawn, logits)]
        chosen[at] = _draw(x[at], rows, drawn)
    tokens[index] = chosen
    bad[index] |= hopeless


def score(logits: Tensor, tokens: Tensor, num_top: int) -> Scored:
    x = logits.float()
    bad = ~x.amax(dim=-1).isfinite()
    x = x.masked_fill(bad[:, None], 0.0)
    given = tokens[:, None]
    top_ids = leading(x, min(num_top, x.shape[-1]))
    logprobs = _logprobs(x, torch.cat((given, top_ids), dim=1)).masked_fill_(bad[:, None], math.nan)
    ranks = 1 + (x > x.gather(-1, given)).sum(dim=-1)
    return Scored(
        logprobs[:, 0],
        ranks.masked_fill_(bad, 0),
        top_ids.masked_fill(bad[:, None], -1),
        logprobs[:, 1:],
    )


def _logprobs(x: Tensor, ids: Tensor) -> Tensor:
    """Float64 inside: a float32 sum over a large vocabulary is wrong by 2e-5."""
    found = torch.empty(ids.shape, device=x.device)
    for start in range(0, len(x), ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        found[part] = x[part].double().log_softmax(dim=-1).gather(-1, ids[part])
    return found


def score_asked(
    logits: Tensor,
    tokens: Tensor,
    bad: Tensor,
    rows: SamplingRows,
    score: Callable[[Tensor, Tensor, int], Scored],
) -> Sampled:
    num_rows, vocab_size = logits.shape
    num_top = min(rows.num_top, vocab_size)
    sampled = Sampled(
        torch.full((num_rows,), math.nan, device=logits.device),
        torch.zeros(num_rows, dtype=torch.int64, device=logits.device),
        torch.full((num_rows, num_top), -1, device=logits.device),
        torch.full((num_rows, num_top), math.nan, device=logits.device),
        tokens=tokens,
        bad=bad,
    )
    if rows.asked:
        asked = _index(rows.asked, logits)
        theirs = logits if len(rows.asked) == num_rows else logits[asked]
        found = score(theirs, tokens[asked], num_top)
        unknown = bad[asked]  # also where the logits are sound, but no token was to be had
        sampled.logprobs[asked] = found.logprobs.masked_fill(unknown, math.nan)
        sampled.ranks[asked] = found.ranks.masked_fill(unknown, 0)
        sampled.top_ids[asked] = found.top_ids.masked_fill(unknown[:, None], -1)
        sampled.top_logprobs[asked] = found.top_logprobs.masked_fill(unknown[:, None], math.nan)
    return sampled


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return send(torch.tensor(rows, dtype=torch.int64, device="cpu"), like.device)


def _edit(x: Tensor, rows: SamplingRows, places: Tensor) -> None:
    """In place: `x` is ours. `places` says where in it a row of the batch is."""
    if rows.allowed:
        at = _at(rows.allowed, places)
        stay = x[at]
        x[at[0]] = -math.inf
        x[at] = stay
    if rows.banned:
        row, token = _at(rows.banned, places)
        last = x.shape[-1] - 1  # an end token may be beyond what the model can say
        ceiling = torch.where(token > last, math.inf, -math.inf).to(x)
        x.view(-1).scatter_reduce_(0, row * (last + 1) + token.clamp(max=last), ceiling, "amin")
    if rows.bias:
        x[_at(rows.bias, places)] += rows.bias.value
    if rows.seen:
        at = _at(rows.seen, places)
        row, count, value = rows.seen.row, rows.seen.value, x[at]
        repetition = rows.repetition[row]
        value = torch.where(value > 0, value / repetition, value * repetition)
        value -= rows.frequency[row] * count
        value -= rows.presence[row] * (count > 0)
        x[at] = value


def masked(x: Tensor, words: Tensor) -> Tensor:
    """[M, V]: -Inf where the row's bit is not set."""
    bits = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : x.shape[-1]].bool()
    return x.masked_fill(~allowed, -math.inf)


def _at(entries: Entries, places: Tensor) -> tuple[Tensor, Tensor]:
    return places[entries.row], entries.token


def _draw(x: Tensor, rows: SamplingRows, drawn: list[int]) -> Tensor:
    """`x` holds the edited logits of the rows `drawn`."""
    index = _index(drawn, x)
    x = x - x.amax(dim=-1, keepdim=True)
    x /= rows.temperature[index, None]
    x.masked_fill_(x < rows.min_p[index, None].log(), -math.inf)
    keys = _keys(rows.seed[index], rows.position[index])
    tokens = torch.empty(len(x), dtype=torch.int64, device=x.device)
    limits = dict(zip(rows.narrowed, rows.limits, strict=True))
    wide = [i for i, row in enumerate(drawn) if row not in limits]
    if wide:
        at = _index(wide, x)
        every = torch.arange(x.shape[-1], device=x.device)
        tokens[at] = noise(keys[at], every).add_(x[at]).argmax(dim=-1)
    narrow = [i for i, row in enumerate(drawn) if row in limits]
    if narrow:
        at = _index(narrow, x)
        top_k = [limits[drawn[i]] or x.shape[-1] for i in narrow]
        tokens[at] = _draw_narrow(x[at], top_k, rows.top_p[index[at]], keys[at])
    return tokens


def _draw_narrow(x: Tensor, limits: list[int], top_p: Tensor, keys: Tensor) -> Tensor:
    vocab_size = x.shape[-1]
    limits = [min(limit, vocab_size) for limit in limits]
    top_k = _index(limits, x)
    enough = max(k if k < vocab_size else min(NUM_LEADING, vocab_size) for k in limits)
    all_limited = max(limits) < vocab_size
    tokens, settled = _nucleus(x, top_k, top_p, keys, enough, all_limited)
    if not all_limited and not settled.all():
        rest = (~settled).nonzero().squeeze(-1)
        again = _nucleus(x[rest], top_k[rest], top_p[rest], keys[rest], vocab_size, False)
        tokens[rest] = again[0]
    return tokens


def _nucleus(
    x: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, width: int, all_limited: bool
) -> tuple[Tensor, Tensor]:
    """Draw among the first `width` tokens, and whether those were all that top-p keeps. The same
    numbers come out for any width that suffices: sums run from the first token on. `all_limited`:
    every row has a top-k."""
    ids = leading(x, width)
    values = x.gather(-1, ids)
    mass = values.exp().cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    has_k = top_k < x.shape[-1]
    of_k = mass.gather(-1, (top_k - 1).clamp(max=width - 1)[:, None])
    # not a sum: its bits depend on whether the row is alone
    of_all = of_k if all_limited else x.exp().cumsum(dim=-1)[:, -1:]
    wanted = top_p[:, None] * torch.where(has_k[:, None], of_k, of_all)
    kept = torch.arange(width, device=x.device) < top_k[:, None]
    kept &= (before < wanted) | (top_p[:, None] == 1)
    scores = (values + noise(keys, ids)).masked_fill_(~kept, -math.inf)
    tokens = ids.gather(-1, scores.argmax(dim=-1, keepdim=True)).squeeze(-1)
    settled = has_k | (mass[:, -1] >= wanted[:, 0])
    return tokens, settled if width < x.shape[-1] else torch.ones_like(settled)


def leading(x: Tensor, k: int) -> Tensor:
    """[R, k]: the ids of the k largest of each row, the largest first, equal ones by id. topk alone
    takes equal ones in any order, and which of them depends on k."""
    if k == x.shape[-1]:
        return x.sort(dim=-1, descending=True, stable=True).indices
    if k == 0:
        return torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
    least = x.topk(k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = x > least, x == least
    room = k - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= room))
    ids = torch.nonzero_static(chosen, size=len(x) * k)[:, 1].view(len(x), k)  # in order of ids
    order = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def mix_(z: Tensor) -> Tensor:
    """splitmix64's finaliser, on int64 that wraps around, in place. Torch shifts copy the sign:
    mask it."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        if multiplier != 1:
            z *= _signed(multiplier)
    return z


def _keys(seed: Tensor, position: Tensor) -> Tensor:
    golden = _signed(GOLDEN)
    return mix_(mix_(seed + golden) + (position + 1) * golden)


def noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [R, M] for the keys [R] and the tokens [M] or [R, M]."""
    bits = mix_(keys[:, None] + (tokens + 1) * _signed(GOLDEN))
    bits = (bits >> 12).bitwise_and_(2**52 - 1)
    uniform = bits.double().mul_(2.0**-52).add_(2.0**-53)  # exact: an odd number over 2**53
    return uniform.log_().neg_().log_().neg_()
