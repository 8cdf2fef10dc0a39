"""How to choose tokens, as a caller says it. Names and defaults are vLLM's; no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec
from msgspec.structs import force_setattr

from trueline.errors import UsageError, short_repr
from trueline.grammar.structured import StructuredOutputsParams
from trueline.utils.named_fields import NamesUnknownFields

GREEDY_BELOW = 1e-5
"""Temperatures below it mean greedy: callers write 1e-6 where a library refuses 0."""
MAX_N = 16_384
MAX_BIAS = 100.0
DEFAULT_MAX_LOGPROBS = 20
INT64 = 2**63


class SamplingParams(
    msgspec.Struct,
    metaclass=NamesUnknownFields,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
):
    """Checked and normalised once; afterwards lists are tuples and what it says is so."""

    NOUN: ClassVar[str] = "sampling parameter"
    NOT_OFFERED: ClassVar[Mapping[str, str]] = {
        "best_of": "draw n and rank them by their logprobs",
        "use_beam_search": "draw n instead",
    }

    n: int = 1
    """Sequences drawn from the same prompt."""
    temperature: float = 1.0
    """0 is greedy: the likeliest token, of equal ones that with the lowest id."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    """None or -1: another one for every request."""
    stop: Sequence[str] = ()
    """Text that ends the output when it appears; one string or several."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: as many as the model's length leaves."""
    min_tokens: int = 0
    """So many tokens come before any that would end the output."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with each one drawn, besides itself; -1: all."""
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """What form the output has; also as a mapping of its fields."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                self._refuse(name, "True or False")
        self._check_texts()
        self._check_tokens()
        if isinstance(self.structured_outputs, Mapping):
            found = StructuredOutputsParams(**self.structured_outputs)
            force_setattr(self, "structured_outputs", found)
        elif not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            self._refuse("structured_outputs", "a StructuredOutputsParams, or None")
        if self.seed == -1:
            force_setattr(self, "seed", None)
        self._check_together()

    def _check_numbers(self) -> None:
        for name, low, high, accepted in REALS:
            value = getattr(self, name)
            if not _is_real(value) or not low <= value <= high:
                self._refuse(name, accepted)
            force_setattr(self, name, float(value))
        for name, low, high, may_be_none, accepted in WHOLES:
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if type(value) is not int or not low <= value <= high:
                self._refuse(name, accepted)

    def _check_texts(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("bad_words", self.bad_words)):
            texts = _as_tuple(value)
            if texts is None or not all(isinstance(text, str) and text for text in texts):
                self._refuse(name, "a list of texts that are not empty")
            force_setattr(self, name, texts)
        if any(not word.strip() for word in self.bad_words):
            self._refuse("bad_words", "words of more than white space")

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            ids = _as_tuple(value)
            if ids is None or not all(type(token) is int and token >= 0 for token in ids):
                self._refuse(name, "a list of token ids")
            force_setattr(self, name, tuple(dict.fromkeys(ids)))
        if self.allowed_token_ids == ():
            self._refuse("allowed_token_ids", "at least one token id, or None for all")
        if self.logit_bias is not None:
            force_setattr(self, "logit_bias", self._read_bias(self.logit_bias))

    def _read_bias(self, bias: object) -> dict[int, float] | None:
        found: dict[int, float] = {}
        for key, value in bias.items() if isinstance(bias, Mapping) else [(None, None)]:
            # JSON has no numbers as keys
            token = int(key) if isinstance(key, str) and key.isdecimal() else key
            if type(token) is not int or token < 0 or value is None or not _is_real(value):
                self._refuse("logit_bias", "token ids and numbers, as {42: -1.5}")
            if abs(value) > MAX_BIAS:
                self._refuse(
                    "logit_bias", f"-{MAX_BIAS:g} to {MAX_BIAS:g}; bad_words forbids altogether"
                )
            found[token] = float(value)
        return found or None

    def _check_together(self) -> None:
        if self.is_greedy and self.n > 1:
            raise UsageError(
                f"n = {self.n} with temperature = {self.temperature:g}: greedy choice gives the "
                "same sequence every time; accepted: n = 1, or a higher temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens = {self.min_tokens}: accepted: at most max_tokens, "
                f"which is {self.max_tokens}"
            )

    def _refuse(self, name: str, accepted: str) -> NoReturn:
        raise UsageError(f"{name} = {short_repr(getattr(self, name))}: accepted: {accepted}")

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """From a request's JSON object. OpenAI's clients send null for what was not given."""
        known = set(cls.__struct_fields__)
        absent = {name for name, value in fields.items() if value is None and name in known}
        absent -= _MAY_BE_NONE
        made: SamplingParams = cls(**{name: fields[name] for name in fields if name not in absent})
        return made

    def check_model(self, vocab_size: int, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> None:
        """Refuse what this model, or the engine's limit on logprobs, cannot serve. A `max_logprobs`
        of -1 is no limit."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids: Iterable[int] = getattr(self, name) or ()
            bad = [token for token in ids if token >= vocab_size]
            if bad:
                raise UsageError(
                    f"{name} has token {bad[0]}: accepted: ids below {vocab_size}, the size of "
                    "the vocabulary"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count_logprobs(name, getattr(self, name), vocab_size, max_logprobs)

    def check_length(self, num_prompt_tokens: int, max_model_len: int) -> None:
        """Refuse an answer longer than the prompt leaves room for: it would end early."""
        for name in ("max_tokens", "min_tokens"):
            check_room(name, getattr(self, name), num_prompt_tokens, max_model_len)


REALS = (
    ("temperature", 0.0, math.inf, "0 for greedy, or a positive number"),
    ("top_p", math.ulp(0.0), 1.0, "above 0, up to 1"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    # logits divided by less, or multiplied by more, need not be numbers any more
    ("repetition_penalty", 0.001, 1000.0, "0.001 to 1000; 1 changes nothing"),
    ("presence_penalty", -2.0, 2.0, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
)
"""Name, least, most, what is accepted in words. The server's schemas come from here too."""
_LOGPROBS = "a whole number from 0 to --max-logprobs, or None; -1 for all where that is -1"
WHOLES = (
    ("n", 1, MAX_N, False, f"a whole number from 1 to {MAX_N}"),
    ("top_k", -1, INT64 - 1, False, "a whole number from 1 up; 0 or -1 for all"),
    ("seed", -INT64, INT64 - 1, True, "a whole number of 64 bits, or None"),
    ("max_tokens", 1, INT64 - 1, True, "a whole number from 1 up, or None"),
    ("min_tokens", 0, INT64 - 1, False, "a whole number from 0 up"),
    ("logprobs", -1, INT64 - 1, True, _LOGPROBS),
    ("prompt_logprobs", -1, INT64 - 1, True, _LOGPROBS),
)
"""Name, least, most, whether None is one, what is accepted in words."""
_MAY_BE_NONE = {name for name, *_, may_be_none, _ in WHOLES if may_be_none}
_MAY_BE_NONE |= {"logit_bias", "allowed_token_ids", "structured_outputs"}


_OF_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json. How long an answer may be is the caller's to say."""


def default_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that the model's authors recommend where a caller says nothing, as
    in vLLM; `do_sample` false is greedy."""
    found = {
        name: generation_config[name]
        for name in _OF_THE_MODEL
        if generation_config.get(name) is not None
    }
    sampled = generation_config.get("do_sample")
    if not isinstance(sampled, bool | None):
        said = f"do_sample = {short_repr(sampled)}"
        raise UsageError(f"generation_config.json: {said}: accepted: true or false")
    if sampled is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except UsageError as error:
        raise UsageError(f"generation_config.json: {error}") from None
    return found


def count_logprobs(name: str, asked: int | None, vocab_size: int, max_logprobs: int) -> int | None:
    """How many that is: -1 is all of the vocabulary, which a limit of -1 lets through."""
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    wanted = vocab_size if asked == -1 else asked
    if wanted is not None and wanted > limit:
        meaning = f", all {vocab_size} tokens" if asked == -1 else ""
        raise UsageError(
            f"{name} = {asked}{meaning}: accepted: up to {limit}; --max-logprobs raises the limit, "
            "-1 removes it"
        )
    return wanted


def check_room(name: str, asked: int | None, num_prompt_tokens: int, max_model_len: int) -> None:
    room = max_model_len - num_prompt_tokens
    if asked is not None and asked > room > 0:  # without any room the prompt itself is refused
        raise UsageError(
            f"{name} = {asked}: the prompt has {num_prompt_tokens} tokens, and max_model_len = "
            f"{max_model_len} leaves {room} for the answer; accepted: up to {room}"
            + ", or none given for as many as there is room for"
            * (name != "min_tokens")
        )


def request_seed(params: SamplingParams, engine_seed: int, number: int) -> int:
    """A request's own seed, or one drawn from the engine's and its number in the order of
    arrival."""
    if params.seed is not None:
        return params.seed
    name = f"{engine_seed}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")


def sequence_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n sequences. The first one's is the request's own, so that it is
    the same sequence whatever n is."""
    if index == 0:
        return seed
    # splitmix64: neighbouring requests and neighbouring sequences share nothing
    mask = 2**64 - 1
    mixed = (seed + index * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= INT64 else mixed


def _is_real(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < INT64


def _as_tuple(value: object) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, list | tuple) else None
