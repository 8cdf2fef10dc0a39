"""Logprobs as OpenAI's two formats and vLLM's prompt_logprobs have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trueline.outputs import Logprob, Logprobs
from trueline.server.protocol.raw_json import in_pieces
from trueline.server.protocol.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from trueline.text.detokenize import Detokenizer
from trueline.text.tokenizer import Tokenizer

LEAST = -9999.0
"""JSON has no -inf."""


def _finite(value: float) -> float:
    return max(LEAST, value)  # in this order, also for NaN


class TokenNames:
    """How tokens are called in logprobs: by their text, or where `as_ids` as token_id:NUMBER."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def __call__(self, token: int, prefix: str = "") -> tuple[str, bytes]:
        """Name and bytes; bytes that are no character by themselves are spelled out behind
        `prefix`, so that different tokens look different."""
        spelled = self.tokenizer.token_bytes(token)
        if self.as_ids:
            return f"token_id:{token}", spelled
        try:
            return spelled.decode(), spelled
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in spelled), spelled


def chat_logprobs(
    names: TokenNames, ids: Iterable[int], logprobs: Logprobs, count: int
) -> ChatLogprobs:
    return ChatLogprobs(in_pieces(token_logprobs(names, ids, logprobs, count)))


def token_logprobs(
    names: TokenNames, ids: Iterable[int], logprobs: Logprobs, count: int
) -> list[TokenLogprob]:
    content = []
    for token, entry in zip(ids, logprobs, strict=True):
        assert entry is not None
        text, spelled = names(token)
        top = [
            TopLogprob(name, _finite(found.logprob), list(raw))
            for (name, raw), found in (
                (names(other), found) for other, found in list(entry.items())[:count]
            )
        ]
        own = entry[token]
        content.append(TokenLogprob(text, _finite(own.logprob), list(spelled), top, own.rank))
    return content


class CompletionScores:
    """The older format, for one choice's tokens as they come. An offset is how much text the
    tokens before have made certain."""

    def __init__(self, names: TokenNames, skip_special_tokens: bool, count: int) -> None:
        self._names, self._count = names, count
        self._tokenizer = names.tokenizer
        self._text = Detokenizer(self._tokenizer, skip_special_tokens)
        self._place = 0

    def prompt(self, ids: Sequence[int], logprobs: Logprobs, text: str) -> CompletionLogprobs:
        """An echoed prompt. Special tokens have a place in it where its text spells them: the
        ones that the tokenizer puts around a text are not in it."""
        found = CompletionLogprobs([], [], [], [])
        spelled = Detokenizer(self._tokenizer, skip_special_tokens=False)
        for token, entry in zip(ids, logprobs, strict=True):
            self._add(found, token, entry)
            piece = spelled.push([token])
            if token not in self._tokenizer.special_ids or text.startswith(piece, self._place):
                self._place += len(piece)
        self._place = len(text)
        return found

    def answer(self, ids: Iterable[int], logprobs: Logprobs) -> CompletionLogprobs:
        found = CompletionLogprobs([], [], [], [])
        for token, entry in zip(ids, logprobs, strict=True):
            self._add(found, token, entry)
            self._place += len(self._text.push([token]))
        return found

    def _add(self, found: CompletionLogprobs, token: int, entry: dict[int, Logprob] | None) -> None:
        found.tokens.append(self._text_of(token))
        found.text_offset.append(self._place)
        if entry is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            return
        own = _finite(entry[token].logprob)
        top: dict[str, float] = {}
        for other, score in list(entry.items())[: self._count]:
            # of two tokens that look the same, the likelier one
            top.setdefault(self._text_of(other), _finite(score.logprob))
        found.token_logprobs.append(own)
        found.top_logprobs.append(top | {self._text_of(token): own})

    def _text_of(self, token: int) -> str:
        return self._names(token, "bytes:")[0]


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(ids: Sequence[int], logprobs: Logprobs, count: int) -> Logprobs:
    """The likeliest `count` at each position, and the prompt's own token. The engine may have
    been asked for more."""
    return [
        None if entry is None else _cut(token, entry, count)
        for token, entry in zip(ids, logprobs, strict=True)
    ]


def _cut(token: int, entry: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    kept = dict(list(entry.items())[:count])
    kept.setdefault(token, entry[token])
    return {
        name: found
        if found.logprob >= LEAST
        else Logprob(_finite(found.logprob), found.rank, found.decoded_token)
        for name, found in kept.items()
    }
