"""What this server takes, as far as a request can be checked without the engine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from trueline.engine.params import DEFAULT_MAX_LOGPROBS, check_room, count_logprobs
from trueline.errors import UsageError, did_you_mean, short
from trueline.server.protocol.errors import ApiError, bad_request


class Limits(msgspec.Struct, frozen=True, kw_only=True):
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
        """What no prompt leaves room for, before anybody reads one."""
        for field, asked in answer.items():
            if asked is not None and asked >= self.max_model_len:
                raise bad_request(
                    f"{field} = {asked}: accepted: up to {self.max_model_len - 1}, which leaves "
                    f"one of max_model_len = {self.max_model_len} for the prompt",
                    field,
                    "context_length_exceeded",
                )

    def check_length(self, name: str, num_tokens: int, answer: Mapping[str, int | None]) -> None:
        """Of a prompt, and of the answer by the fields that say how long it is to be."""
        if num_tokens >= self.max_model_len:
            raise bad_request(
                f"{name}: {num_tokens} tokens; accepted: up to {self.max_model_len - 1}, which "
                f"leaves one of max_model_len = {self.max_model_len} for the answer",
                name,
                "context_length_exceeded",
            )
        for field, asked in answer.items():
            try:
                check_room(field, asked, num_tokens, self.max_model_len)
            except UsageError as error:
                raise bad_request(str(error), field, "context_length_exceeded") from None
