"""What this server takes, as far as a request can be checked without the engine.

Whatever a client can make long has its limit here, and nowhere else: the bodies' types, the OpenAPI
document and docs/server.md take it from these tables. Each is what can be read, checked and served
without others noticing it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trueline.engine.params import DEFAULT_MAX_LOGPROBS, check_room, count_logprobs
from trueline.errors import UsageError, did_you_mean, short
from trueline.server.protocol.errors import ApiError, bad_request

MAX_ITEMS = {
    "messages": 4096,
    "input": 4096,
    "include": 16,
    "chat_template_kwargs": 256,
    "tools": 128,
    "stop": 64,
    "bad_words": 1024,
    "stop_token_ids": 1024,
    "logit_bias": 1024,
    "allowed_token_ids": 16_384,
}
"""Entries of a list or an object."""
MAX_CHARS = {
    "model": 1024,
    "cache_salt": 1024,
    "chat_template": 20_480,
    "reasoning_effort": 32,
    "stop": 256,
    "bad_words": 64,
}
"""Characters of a text, or of each of a list."""
MAX_TOOLS_BYTES = 1 << 19
"""Of all tools together, as JSON."""
MAX_VALUES = 1 << 19
"""In a body: items of lists and members of objects; or twice the model's length, if it is more."""
MAX_NESTED = 1 << 15
"""In a body: lists and objects, which cost most to make."""
MAX_FRACTIONS = 1 << 12
"""In a body: numbers with a fraction or an exponent, which cost most to read."""
MAX_DIGITS = 40
"""Characters of a number; those of a float64 are at most 24."""
MAX_PROMPT_TOKENS = 1 << 20
"""Of all sequences of a request together; or twice the model's length, if that is more. As many
logprobs of prompt tokens."""
MAX_CHOSEN_IDS = 1 << 18
"""Token ids of `CHOSEN_IDS`, of all sequences of a request together."""
CHOSEN_IDS = ("bad_words", "allowed_token_ids", "logit_bias", "stop_token_ids")


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[str, ...]
    """The names it goes by; the first where a request names none."""
    max_model_len: int
    vocab_size: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """-1: no limit."""
    max_sequences: int = 1024
    """Prompts × n of one request."""
    request_templates: bool = False
    """Whether a request may bring its own chat_template: code of a stranger."""
    default_params: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Of the sampling, where a request says nothing: the model's generation_config.json."""

    def model(self, name: str | None) -> str:
        if name is None:
            return self.models[0]
        if name not in self.models:
            raise ApiError(
                404,
                f"model '{short(name)}' is not served here; accepted: {', '.join(self.models)}"
                f"{did_you_mean(name, self.models)}",
                param="model",
                code="model_not_found",
            )
        return name

    def logprobs(self, name: str, asked: int | None) -> int | None:
        """How many are asked for; -1 is all of the vocabulary."""
        try:
            return count_logprobs(name, asked, self.vocab_size, self.max_logprobs)
        except UsageError as error:
            raise bad_request(str(error), name) from None

    def check_answer(self, answer: Mapping[str, int | None]) -> None:
        """Refuses lengths for which no prompt leaves room, before one is tokenized."""
        for field, asked in answer.items():
            if asked is not None and asked >= self.max_model_len:
                raise bad_request(
                    f"{field} = {asked}: accepted: up to {self.max_model_len - 1}, which leaves "
                    f"one of max_model_len = {self.max_model_len} for the prompt",
                    field,
                    "context_length_exceeded",
                )

    def check_length(
        self,
        name: str,
        num_tokens: int,
        answer: Mapping[str, int | None] | None = None,
        *,
        least: bool = False,
    ) -> None:
        """Refuses a prompt that is too long, or too long for the answer's length, which `answer`
        gives by field. `least`: `num_tokens` is a lower bound, of a text not yet encoded."""
        if num_tokens >= self.max_model_len:
            found = f"at least {num_tokens}" if least else f"{num_tokens}"
            raise bad_request(
                f"{name}: {found} tokens; accepted: up to {self.max_model_len - 1}, which "
                f"leaves one of max_model_len = {self.max_model_len} for the answer",
                name,
                "context_length_exceeded",
            )
        for field, asked in (answer or {}).items():
            try:
                check_room(field, asked, num_tokens, self.max_model_len)
            except UsageError as error:
                raise bad_request(str(error), field, "context_length_exceeded") from None

    @property
    def max_values(self) -> int:
        return max(MAX_VALUES, 2 * self.max_model_len)

    @property
    def max_prompt_tokens(self) -> int:
        return max(MAX_PROMPT_TOKENS, 2 * self.max_model_len)

    def check_tokens(self, name: str, num_tokens: int) -> None:
        """The length of a text that need not fit the model."""
        if num_tokens > self.max_values:
            raise bad_request(
                f"{name}: at least {num_tokens} tokens; accepted: up to {self.max_values}", name
            )

    def check_prompts(self, num_tokens: int, n: int, num_scores: int | None) -> None:
        """All prompts of a request. `num_scores`: how many logprobs are reported for each token."""
        most, given = self.max_prompt_tokens, f"{num_tokens} tokens of prompts × n = {n}"
        if num_tokens * n > most:
            raise bad_request(f"{given}: accepted: up to {most} in one request", "n")
        if num_scores is not None and num_tokens * n * num_scores > most:
            raise bad_request(
                f"{given} × {num_scores} logprobs of each: accepted: up to {most} in one request",
                "prompt_logprobs",
            )

    def check_chosen_ids(self, counts: Mapping[str, int], num_sequences: int) -> None:
        """`counts`: of CHOSEN_IDS."""
        total = sum(counts.values())
        if total * num_sequences > MAX_CHOSEN_IDS:
            name = max(counts, key=lambda name: counts[name])
            raise bad_request(
                f"{name}: {total} token ids in {', '.join(CHOSEN_IDS)} × {num_sequences} "
                f"sequences: accepted: up to {MAX_CHOSEN_IDS} in one request",
                name,
            )
