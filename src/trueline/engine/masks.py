"""The token masks of a step's constrained rows: written on the host by their guides, a bit for each
token, and sent to where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trueline.grammar.guide import AllBut, ByGrammar, Guide, Only
from trueline.grammar.vocabulary import WORD, mask_words
from trueline.ops.sampling import SamplingState, TokenMask

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLExecutor, LLMatcher
    from numpy.typing import NDArray

_ALL = 0xFFFFFFFF


class TokenMasks:
    """Two pinned buffers alternate: the copy of a step may still be under way when the next is
    written."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words, self._device = mask_words(vocab_size), device
        self._buffers = [self._buffer(1), self._buffer(1)]
        self._executor: LLExecutor | None = None

    def of(self, states: Sequence[SamplingState]) -> TokenMask | None:
        """Of the rows whose next token is not free, in their order; each row of the mask is written
        whole."""
        found = [
            (row, state.guide, allowed)
            for row, state in enumerate(states)
            if isinstance(state.guide, Guide) and (allowed := state.guide.allowed()) is not None
        ]
        if not found:
            return None
        words = self._next_buffer(len(found))
        bits: NDArray[np.uint32] = words.numpy().view("uint32")
        by_grammar: list[tuple[LLMatcher, int]] = []
        for i, (_, _, allowed) in enumerate(found):
            bits[i] = _ALL if isinstance(allowed, AllBut) else 0
            if isinstance(allowed, ByGrammar):
                by_grammar.append((allowed.matcher, i))
            else:
                _put(bits[i], allowed.tokens, isinstance(allowed, Only))
        self._compute(by_grammar, words)
        for i, (_, guide, allowed) in enumerate(found):
            if isinstance(allowed, ByGrammar):
                _put(bits[i], allowed.ends, False)
                _put(bits[i], allowed.allowed_ends, True)
                guide.check(allowed.matcher)
        rows = tuple(row for row, _, _ in found)
        sent = words if self._device.type == "cpu" else words.to(self._device, non_blocking=True)
        return TokenMask.of_rows(rows, sent)

    def _compute(self, matchers: list[tuple[LLMatcher, int]], words: Tensor) -> None:
        """All cores, while other threads of Python go on."""
        if not matchers:
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        bytes_each = words.shape[1] * words.element_size()
        self._executor.unsafe_compute_mask_ptr(matchers, words.data_ptr(), bytes_each, len(words))

    def _buffer(self, rows: int) -> Tensor:
        pin = self._device.type == "cuda"
        return torch.empty(rows, self._words, dtype=torch.int32, device="cpu", pin_memory=pin)

    def _next_buffer(self, rows: int) -> Tensor:
        self._buffers.reverse()
        if len(self._buffers[0]) < rows:
            self._buffers[0] = self._buffer(rows)
        return self._buffers[0][:rows]


def _put(bits: NDArray[np.uint32], tokens: Sequence[int], allowed: bool) -> None:
    for token in tokens:
        word, bit = token // WORD, 1 << token % WORD
        if word < len(bits):  # an end token may be beyond what the model can say
            bits[word] = int(bits[word]) | bit if allowed else int(bits[word]) & ~bit & _ALL
