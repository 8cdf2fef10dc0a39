"""What this server takes, as far as a request can be checked without the engine."""

from __future__ import annotations

import msgspec

from trueline.engine.params import DEFAULT_MAX_LOGPROBS
from trueline.errors import did_you_mean, short
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
        most = self.vocab_size if self.max_logprobs == -1 else self.max_logprobs
        wanted = self.vocab_size if asked == -1 else asked
        if wanted is not None and wanted > most:
            raise bad_request(
                f"{name} = {asked}: accepted: up to {most}; --max-logprobs raises the limit", name
            )
        return wanted

    def check_length(self, name: str, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise bad_request(
                f"{name}: {num_tokens} tokens; accepted: up to {self.max_model_len - 1}, which "
                f"leaves one of max_model_len = {self.max_model_len} for the answer",
                name,
                "context_length_exceeded",
            )
