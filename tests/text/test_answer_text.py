"""Where an answer's text ends, against a definition that searches the whole text. One character a
token, so that places in the text are places among the tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trueline.engine.messages import CoreOutput, TokenScore
from trueline.engine.params import SamplingParams
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Any) -> Tokenizer:
    return Tokenizer.load(tiny("deepseek_v3"))


def answered(
    tokenizer: Tokenizer, params: SamplingParams, text: str, reason: str = "length"
) -> RequestOutputState:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    made = RequestOutputState("a", None, [1], PreparedParams(params, tokenizer))
    for place, token in enumerate(ids, 1):
        score = TokenScore(token, -1.0, 1)
        last = reason if place == len(ids) else None
        output = CoreOutput(request_id="a", token_ids=[token], scores=[score], finish_reason=last)
        made.update(output)
    return made


def said(made: RequestOutputState) -> tuple[str, str | None, Any, int]:
    done = made.output.outputs[0]
    return done.text, done.finish_reason, done.stop_reason, len(done.token_ids)


@given(
    text=st.text("aab", min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True),
    include=st.booleans(),
)
@example(text="aab", stops=["b", "ab"], include=False)  # both complete with the same character
def test_stop_strings(tokenizer: Tokenizer, text: str, stops: list[str], include: bool) -> None:
    """What is complete first, of several the longest; whatever was held back comes out at last."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    made = answered(tokenizer, params, text)
    places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not places:
        assert said(made) == (text, "length", None, len(text))
        assert made.to_stop() == []
        return
    end, _, stop = min(places)
    shown = text[:end] if include else text[: end - len(stop)]
    assert said(made) == (shown, "stop", stop, end)
    assert made.to_stop() == ["a"], "the engine must hear of it"
    assert made.to_stop() == [], "once"


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("min_tokens", range(7))
def test_a_stop_around_min_tokens(tokenizer: Tokenizer, first: int, min_tokens: int) -> None:
    """The first stop at or after min_tokens ends the answer."""
    text = "".join("x" if place >= first else "-" for place in range(1, 8))
    params = SamplingParams(stop=["x"], min_tokens=min_tokens)
    end = max(first, min_tokens)
    assert said(answered(tokenizer, params, text)) == (text[: end - 1], "stop", "x", end)


@pytest.mark.parametrize("include", [False, True])
def test_an_end_token_is_no_text(tokenizer: Tokenizer, include: bool) -> None:
    """Also an ordinary one, which stop_token_ids named; where it is asked for, it is shown."""
    params = SamplingParams(include_stop_str_in_output=include)
    made = answered(tokenizer, params, "word.", "stop")
    assert said(made) == ("word." if include else "word", "stop", None, 5)
