"""One sequence's answer does not depend on how many of its tokens come at once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.answers import Answer
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.engine.params import SamplingParams
from trueline.outputs import CompletionOutput
from trueline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Any) -> Tokenizer:
    directory: Path = tiny("deepseek_v3")
    return Tokenizer.load(directory)


def answer(
    tokenizer: Tokenizer, params: SamplingParams, pieces: list[list[int]]
) -> CompletionOutput:
    found = Answer("a", None, [1], params, tokenizer)
    for place, ids in enumerate(pieces):
        end = "length" if place == len(pieces) - 1 else None
        scores = [TokenScore(token, -float(token), 1) for token in ids]
        found.take(CoreOutput(request_id="a/0", token_ids=ids, scores=scores, finish_reason=end))
    return found.copies[0].completion


@given(
    text=st.text("aeq 日", min_size=1, max_size=30),
    stop=st.lists(st.text("aeq日", min_size=1, max_size=3), max_size=2, unique=True),
    min_tokens=st.integers(0, 12),
    cuts=st.sets(st.integers(1, 40)),
    include=st.booleans(),
)
def test_all_at_once_is_one_by_one(
    tokenizer: Tokenizer, text: str, stop: list[str], min_tokens: int, cuts: set[int], include: bool
) -> None:
    ids = tokenizer.encode(text)
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=200, logprobs=1,
                            include_stop_str_in_output=include)  # fmt: skip
    ends = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    pieces = [ids[a:b] for a, b in pairwise(ends)]
    single = answer(tokenizer, params, [[token] for token in ids])
    assert answer(tokenizer, params, pieces) == single
    assert answer(tokenizer, params, [ids]) == single
