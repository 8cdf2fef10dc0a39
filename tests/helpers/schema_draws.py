"""Texts drawn at random through a guide, as an engine would without a model; and what a validator
that shares nothing with us says of them."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import trueline.grammar
from schemas import FORMATS, Schema, schemas
from trueline.engine.masks import TokenMasks
from trueline.engine.params import SamplingParams
from trueline.grammar.compiled import parser_limits
from trueline.grammar.constraint import Constraint
from trueline.grammar.guide import Guide
from trueline.ops.sampling import SamplingState

LONG = [b'{"', b'":', b'": ', b'"}', b'", "', b'"]', b"[]", b"{}", b"true", b"null", b"\n  ", b"00",
        b".5", b"e+", b"\\u00", b"\\n", b"ab", b"aaa", b"\xc3\xa9", b"\xf0\x9f", b'x1":', b"},{",
        b"],[", b"-1", b"1.0", b"20", b"T00:", b"-02-29", b":60"]  # fmt: skip
TOKENS = [*(bytes([each]) for each in range(256)), *LONG]
END = len(TOKENS)
SCHEMAS = schemas(22, 1800)
CLOSING = np.array([i for i, token in enumerate(TOKENS) if token[:1] in b'"}]'])


def sample(count: int) -> list[Schema]:
    """Others with every change of the code, and for each revision the same."""
    sources = sorted(Path(trueline.grammar.__file__).parent.glob("*.py"))
    seed = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    return random.Random(seed).sample(SCHEMAS, count)


class _Vocabulary:
    bos_token_id = None
    eos_token_id = END
    tokens = (*TOKENS, b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary()))


def drawn(grammar: str, draw: random.Random, most: int = 300) -> str | None:
    """None: no end after so many tokens. What a token mask forbids is never drawn; AssertionError
    where nothing may be drawn, or what was allowed is not taken."""
    matcher = LLMatcher(_vocabulary(), grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    guide = Guide(Constraint(grammar=grammar), {grammar: matcher}, (END,))
    state = SamplingState(
        params=SamplingParams(), prompt_ids=[], output_ids=[], position=0, eos_ids=(END,), seed=0,
        bad_words=[], guide=guide,
    )  # fmt: skip
    masks, said = TokenMasks(END + 1, torch.device("cpu")), b""
    for i in range(most):
        mask = masks.of([state])
        assert mask is not None
        bits = np.unpackbits(mask.words.numpy().view("uint8")[0], bitorder="little")[: END + 1]
        assert not guide.problem, (guide.problem, said)
        assert bits.any(), ("nothing may follow", said)
        token = _chosen(bits, draw, hurry=min(0.15 + i / 100, 0.9))
        guide.accept(token)
        assert not guide.problem, (guide.problem, said)
        said += b"" if token == END else TOKENS[token]
        if guide.complete:
            return said.decode()
    return None


def _chosen(bits: np.ndarray[Any, Any], draw: random.Random, hurry: float) -> int:
    """More and more what closes."""
    allowed = np.flatnonzero(bits)
    if draw.random() < hurry:
        if bits[END]:
            return END
        if len(closing := np.intersect1d(allowed, CLOSING)):
            allowed = closing
    return int(draw.choice(allowed))


def draws(grammar: str, draw: random.Random, count: int) -> Iterator[str]:
    """Of so many tries, those that came to an end."""
    return (text for _ in range(count) if (text := drawn(grammar, draw)) is not None)


# -- the validator -------------------------------------------------------------------------

_FORMATS = jsonschema.FormatChecker(formats=())


def _has_format(name: str, value: Any) -> bool:
    if name == "email" and isinstance(value, str):
        # the form of a mailbox (RFC 5321, 4.1.2) says nothing of lengths
        local, _, domain = value.rpartition("@")
        labels = [label[:60].rstrip("-") for label in domain.split(".")[-3:]]
        value = f"{local[:60].rstrip('.')}@{'.'.join(labels)}"
    checked = jsonschema_rs.Draft202012Validator({"format": name}, validate_formats=True)
    return checked.is_valid(value)


for _name in FORMATS:
    _FORMATS.checks(_name)(partial(_has_format, _name))

_CLASSES = {"\\d": "[0-9]", "\\D": "[^0-9]", "\\w": "[0-9A-Za-z_]", "\\W": "[^0-9A-Za-z_]"}


def _ecma(pattern: str) -> str:
    """For Python's `re`, whose classes are wider, and whose $ is also before a last line feed."""
    found = re.sub(r"\\[dDwW]", lambda m: _CLASSES[m[0]], pattern)
    return re.sub(r"\$$", r"\\Z", found).replace("$)", r"\Z)")


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and not re.search(_ecma(pattern), value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _multiple(validator: Any, of: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(value, "number"):
        return
    if not math.isfinite(value) or (Fraction(value) / Fraction(of)).denominator != 1:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {of}")


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _pattern, "multipleOf": _multiple}
)


def exact(text: str) -> Any:
    """Numbers as they are written: a validator's own arithmetic is not what is tested."""
    return json.loads(text, parse_float=_fraction)


def _fraction(text: str) -> Decimal | float:
    """Of what no double holds, what a double makes of it."""
    exponent = text.lower().partition("e")[2]
    return Decimal(text) if len(exponent) < 5 else float(text)


def validator_of(schema: Schema) -> Any:
    return _Validator(exact(json.dumps(schema)), format_checker=_FORMATS)


def problem(schema: Schema, text: str) -> str:
    """Why the text is not what the schema accepts; empty where it is."""
    try:
        value = exact(text)
        text.encode()
    except ValueError as error:
        return f"not JSON: {error}"
    found = next(validator_of(schema).iter_errors(value), None)
    return "" if found is None else found.message
