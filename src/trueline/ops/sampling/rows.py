"""The rows of a step: what the op is given, and how it is made from requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from trueline.device import send


@dataclass(frozen=True, slots=True)
class Entries:
    """Things said of single tokens; no (row, token) twice."""

    row: Tensor  # [E] int64: place in the batch
    token: Tensor  # [E] int64
    value: Tensor  # [E] float64; what it means, the owner says


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens rows may draw, as bits: token t is bit t % 32 of word t // 32."""

    rows: tuple[int, ...]  # places in the batch, ascending
    row: Tensor  # [M] int64: the same
    words: Tensor  # [M, W] int32, of which all of the vocabulary have a bit

    @classmethod
    def of_rows(cls, rows: tuple[int, ...], words: Tensor) -> TokenMask:
        return cls(rows, send(_whole(rows), words.device), words)

    def only(self, rows: Collection[int]) -> TokenMask | None:
        """Of those of its rows that are in `rows`."""
        kept = [i for i, row in enumerate(self.rows) if row in rows]
        if len(kept) == len(self.rows):
            return self
        at = send(_whole(kept), self.words.device)
        chosen = tuple(self.rows[i] for i in kept)
        return TokenMask(chosen, self.row[at], self.words[at]) if kept else None


class Guide(Protocol):
    """What is read of `grammar.guide.Guide`: it decides on the host which tokens a sequence may
    draw."""

    @property
    def complete(self) -> bool: ...
    @property
    def problem(self) -> str: ...
    @property
    def too_complex(self) -> bool: ...
    def accept(self, token: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """One step's rows. Numbers are on the logits' device; the tuples are for the host, which
    needs to know what there is to do without asking the device."""

    temperature: Tensor  # [B] float64; 0 is greedy
    top_k: Tensor  # [B] int64; 0 is all
    top_p: Tensor  # [B] float64
    min_p: Tensor  # [B] float64
    repetition: Tensor  # [B] float64; 1 changes nothing
    presence: Tensor  # [B] float64
    frequency: Tensor  # [B] float64
    seed: Tensor  # [B] int64
    position: Tensor  # [B] int64: of the token to be drawn, counted from the prompt's first
    allowed: Entries | None  # rows that occur here may take these tokens only; value unused
    banned: Entries | None  # value unused; a token beyond the logits' last is no matter
    bias: Entries | None  # value is added
    seen: Entries | None  # tokens of rows with penalties; value is how often in the output
    edited: tuple[int, ...]  # rows in one of the four above
    mask: TokenMask | None  # of rows that a grammar constrains
    drawn: tuple[int, ...]  # rows with a temperature
    narrowed: tuple[int, ...]  # those of them with top-k or top-p
    limits: tuple[int, ...]  # the top-k of those
    asked: tuple[int, ...]  # rows that want logprobs
    num_top: int  # K: the most that any row wants; more than there are tokens means all


class Params(Protocol):
    """What is read of `engine.params.SamplingParams`, which ops may not import."""

    @property
    def temperature(self) -> float: ...
    @property
    def is_greedy(self) -> bool: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float] | None: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def prompt_logprobs(self) -> int | None: ...


@dataclass(slots=True, kw_only=True)
class SamplingState:
    """A sequence about to draw a token. Keep it from step to step and let `output_ids` grow:
    tokens are counted once."""

    params: Params
    prompt_ids: Sequence[int]
    output_ids: list[int]
    position: int
    """Of the token to be drawn: prompt and output tokens before it."""
    eos_ids: Sequence[int]
    seed: int
    bad_words: Sequence[Sequence[int]] = ()
    """The params' words as token ids, by `trueline.text.tokenizer.bad_word_ids`."""
    constrained: bool = False
    """A guide, here or on the first rank, says which tokens it may draw."""
    guide: Guide | None = None
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _num_counted: int = field(default=-1, init=False, repr=False)
    _words: _Words = field(init=False, repr=False)
    _fixed: dict[str, _Column] = field(default_factory=dict, init=False, repr=False)
    """What is the same in every step: made in the first."""

    def __post_init__(self) -> None:
        self._words = _Words(self.bad_words)

    def append(self, token: int, *, bad: bool = False) -> None:
        """It has drawn this token; where the row was bad, the one that stands for none."""
        self.output_ids.append(token)
        if self.guide is not None and not bad:
            self.guide.accept(token)

    @property
    def num_unknown(self) -> int:
        """Tokens drawn by steps whose results are not known yet."""
        return self.position - len(self.prompt_ids) - len(self.output_ids)

    def after(self, drafts: Sequence[int]) -> SamplingState:
        """The same sequence, were these its next tokens."""
        return replace(
            self,
            output_ids=[*self.output_ids, *drafts],
            position=self.position + len(drafts),
        )

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    @property
    def needs_output_ids(self) -> bool:
        """Its next draw depends on which tokens came before, not only on how many: such a row
        waits for the step in flight to be collected."""
        return self.has_penalties or bool(self._words.longer)

    @property
    def is_plain(self) -> bool:
        """Its draw needs nothing but the logits, a temperature and the noise."""
        params = self.params
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        edited = params.logit_bias or params.allowed_token_ids is not None or self.bad_words
        reports = params.logprobs is not None
        waits = self.position - len(self.prompt_ids) < params.min_tokens
        changed = edited or self.constrained or self.has_penalties
        return not (filtered or changed or reports or waits)

    def seen(self) -> dict[int, int]:
        """How often each token is in the output; prompt tokens are in it as well where the
        repetition penalty asks for them."""
        if self._num_counted < 0 or self._num_counted > len(self.output_ids):
            prompt = self.prompt_ids if self.params.repetition_penalty != 1.0 else ()
            self._counts, self._num_counted = dict.fromkeys(prompt, 0), 0
        for token in self.output_ids[self._num_counted :]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._num_counted = len(self.output_ids)
        return self._counts

    def banned(self) -> Iterator[_Column]:
        """Tokens that must not come now, each once."""
        if self._words.single:
            yield self._once("never", lambda: dict.fromkeys(self._words.single, 0.0))
        # by count, not by `output_ids`, which may lag behind a step in flight
        waits = self.position - len(self.prompt_ids) < self.params.min_tokens
        if waits:
            yield self._once("too early", lambda: dict.fromkeys(self._early(), 0.0))
        ends = self._words.ends(self.output_ids) - self._words.single
        if ends := ends - self._early() if waits else ends:
            yield _column(dict.fromkeys(ends, 0.0))

    def _early(self) -> set[int]:
        """What would end the output, and is not banned anyway."""
        eos = () if self.params.ignore_eos else self.eos_ids
        return {*self.params.stop_token_ids, *eos} - self._words.single

    def forbidden(self) -> Mapping[str, set[int]]:
        """What must not come now, by the field that says so, once all tokens before are known."""
        waits = len(self.output_ids) < self.params.min_tokens
        return {
            "bad_words": self._words.single | self._words.ends(self.output_ids),
            "min_tokens": self._early() if waits else set(),
        }

    def allowed(self) -> Iterator[_Column]:
        if (ids := self.params.allowed_token_ids) is not None:
            yield self._once("allowed", lambda: dict.fromkeys(ids, 0.0))

    def bias(self) -> Iterator[_Column]:
        if bias := self.params.logit_bias:
            yield self._once("bias", lambda: bias)

    def _once(self, name: str, entries: Callable[[], Mapping[int, float]]) -> _Column:
        if name not in self._fixed:
            self._fixed[name] = _column(entries())
        return self._fixed[name]


class _Words:
    """Bad words by how they begin: a step looks up how the output ends, at each length that a
    beginning has, and never goes through all words."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.single = {word[0] for word in words if len(word) == 1}
        self.longer: dict[tuple[int, ...], set[int]] = {}
        """All but the last token: what that may be."""
        for *start, last in words:
            if start:
                self.longer.setdefault(tuple(start), set()).add(last)
        self._lengths = sorted({len(start) for start in self.longer})

    def ends(self, output: Sequence[int]) -> set[int]:
        """The last tokens of those that the output has all the others of."""
        if not self._lengths:
            return set()
        end = tuple(output[-self._lengths[-1] :])
        found = (self.longer.get(end[-length:], ()) for length in self._lengths)
        return set().union(*found)


def build_rows(
    states: Sequence[SamplingState],
    device: torch.device | str = "cpu",
    mask: TokenMask | None = None,
) -> SamplingRows:
    params = [state.params for state in states]
    allowed, banned, bias, seen = builders = [_Builder() for _ in range(4)]
    for row, state in enumerate(states):
        allowed.add(row, state.allowed())
        banned.add(row, state.banned())
        bias.add(row, state.bias())
        if state.has_penalties:
            seen.add(row, [_column(state.seen())])
    wholes = [
        [max(p.top_k, 0) for p in params],
        [state.seed for state in states],
        [state.position for state in states],
    ]
    reals = [
        [0.0 if p.is_greedy else p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    ]
    (top_k, seed, position, *places), (temperature, top_p, min_p, *rest) = _sent(
        (wholes, [column for each in builders for column in (each.rows, each.tokens)]),
        (reals, [each.values for each in builders]),
        device,
    )
    entries = [
        Entries(at, token, value) if len(at) else None
        for at, token, value in zip(places[::2], places[1::2], rest[3:], strict=True)
    ]
    top = [p.logprobs for p in params if p.logprobs is not None]
    drawn = tuple(row for row, p in enumerate(params) if not p.is_greedy)
    narrowed = tuple(row for row in drawn if params[row].top_k > 0 or params[row].top_p < 1)
    return SamplingRows(
        temperature,
        top_k,
        top_p,
        min_p,
        repetition=rest[0],
        presence=rest[1],
        frequency=rest[2],
        seed=seed,
        position=position,
        allowed=entries[0],
        banned=entries[1],
        bias=entries[2],
        seen=entries[3],
        edited=tuple(sorted({row for each in builders for row in each.edited})),
        mask=mask,
        drawn=drawn,
        narrowed=narrowed,
        limits=tuple(max(params[row].top_k, 0) for row in narrowed),
        asked=tuple(row for row, p in enumerate(params) if p.logprobs is not None),
        num_top=sys.maxsize if -1 in top else max(top, default=0),
    )


def _sent(
    wholes: tuple[Sequence[Sequence[int]], Sequence[Tensor]],
    reals: tuple[Sequence[Sequence[float]], Sequence[Tensor]],
    device: torch.device | str,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Columns of int64 and of float64, in one copy: both kinds of number have eight bytes."""
    whole = torch.cat([_whole(list(chain(*wholes[0]))), *wholes[1]])
    real = torch.cat([_real(list(chain(*reals[0]))), *reals[1]])
    both = send(torch.cat((whole, real.view(torch.int64))), device)
    there = both[: len(whole)], both[len(whole) :].view(torch.float64)
    first, second = (
        torch.split(part, [*map(len, columns), *map(len, more)])
        for part, (columns, more) in zip(there, (wholes, reals), strict=True)
    )
    return first, second


def _whole(column: Sequence[int]) -> Tensor:
    return torch.tensor(column, dtype=torch.int64, device="cpu")


def _real(column: Sequence[float]) -> Tensor:
    return torch.tensor(column, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True)
class _Column:
    """Things said of single tokens of one row, on the host."""

    token: Tensor
    value: Tensor


def _column(entries: Mapping[int, float]) -> _Column:
    return _Column(_whole(list(entries)), _real(list(entries.values())))


class _Builder:
    def __init__(self) -> None:
        self.edited: list[int] = []
        self._columns: list[_Column] = []

    def add(self, row: int, columns: Iterable[_Column]) -> None:
        for column in columns:
            if len(column.token):
                self.edited.append(row)
                self._columns.append(column)

    @property
    def rows(self) -> Tensor:
        if not self._columns:
            return _NO_TOKENS
        lengths = _whole([len(column.token) for column in self._columns])
        return torch.repeat_interleave(_whole(self.edited), lengths)

    @property
    def tokens(self) -> Tensor:
        return torch.cat([c.token for c in self._columns]) if self._columns else _NO_TOKENS

    @property
    def values(self) -> Tensor:
        return torch.cat([c.value for c in self._columns]) if self._columns else _NO_VALUES


_NO_TOKENS, _NO_VALUES = _whole([]), _real([])
