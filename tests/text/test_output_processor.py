"""One sequence's answer does not depend on how many of its tokens come at once."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.engine.messages import CoreOutput, TokenScore
from trueline.engine.params import SamplingParams
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.outputs import CompletionOutput
from trueline.server.process.streams import Stream
from trueline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Any) -> Tokenizer:
    directory: Path = tiny("deepseek_v3")
    return Tokenizer.load(directory)


def answer(
    tokenizer: Tokenizer, params: SamplingParams, pieces: list[list[int]]
) -> CompletionOutput:
    found = RequestOutputState("a", None, [1], PreparedParams(params, tokenizer))
    for place, ids in enumerate(pieces):
        end = "length" if place == len(pieces) - 1 else None
        scores = [TokenScore(token, -float(token), 1) for token in ids]
        found.update(CoreOutput(request_id="a", token_ids=ids, scores=scores, finish_reason=end))
    return found.output.outputs[0]


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


def stopped(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int, include: bool
) -> tuple[str, int, str | None]:
    """By definition: text, tokens and stop string of the answer that ends with the first token, of
    the min_tokens-th and those after it, with whose text a stop string is complete. Characters
    that came before do not count, and a character comes with the token of its last byte."""
    spelled = [tokenizer.token_bytes(token) for token in ids]
    text = b"".join(spelled).decode()
    ends = list(accumulate(map(len, spelled)))
    places = accumulate(len(char.encode()) for char in text)
    token_of = [1 + bisect_left(ends, place) for place in places]
    first = sum(token < min_tokens for token in token_of)
    for end in range(first + 1, len(text) + 1):
        complete = [stop for stop in stops if text[first:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], token_of[end - 1], stop
    return text, len(ids), None


@given(
    text=st.text("aeq 日the", min_size=2, max_size=30),
    place=st.integers(0, 29),
    length=st.integers(1, 4),
    more=st.lists(st.text("aeq日", min_size=1, max_size=3), max_size=2),
    off=st.sampled_from([None, -1, 0, 1]),
    include=st.booleans(),
)
def test_the_stop_position_is_what_its_definition_says(
    tokenizer: Tokenizer,
    text: str,
    place: int,
    length: int,
    more: list[str],
    off: int | None,
    include: bool,
) -> None:
    """Stops that the text has, where min_tokens is one less, the same and one more than the tokens
    at which they are complete; token by token and all at once."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = min(place, len(text) - 1)
    stop = text[begin : begin + length]
    done = len(tokenizer.encode(text[: begin + len(stop)], add_special_tokens=False))
    min_tokens = 0 if off is None else max(done + off, 0)
    stops = list(dict.fromkeys([stop, *more]))
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=200,
                            include_stop_str_in_output=include)  # fmt: skip
    wanted, count, reason = stopped(tokenizer, ids, stops, min_tokens, include)
    for pieces in ([[token] for token in ids], [ids]):
        found = answer(tokenizer, params, pieces)
        assert (found.text, len(found.token_ids), found.stop_reason) == (wanted, count, reason)
        assert found.finish_reason == ("length" if reason is None else "stop")


def test_a_stop_is_told_to_the_engine_once(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["b"], n=3, max_tokens=9, temperature=1.0)
    found = RequestOutputState("a", None, [1], PreparedParams(params, tokenizer))
    ids = tokenizer.encode("abab", add_special_tokens=False)
    for index in (2, 0):
        scores = [TokenScore(token, -1.0, 1) for token in ids]
        found.update(CoreOutput(request_id=f"a/{index}", token_ids=ids, scores=scores))
        assert found.to_stop() == [f"a/{index}"]
        assert found.to_stop() == []
    assert [completion.finish_reason for completion in found.output.outputs] == [
        "stop",
        None,
        "stop",
    ]


OUTPUTS = st.builds(
    CoreOutput,
    request_id=st.just("a"),
    token_ids=st.lists(st.integers(0, 9), max_size=3),
    num_cached_tokens=st.sampled_from([0, 0, 16]),
    first_scheduled=st.sampled_from([None, 2.5]),
    prompt_scores=st.lists(st.builds(TokenScore, st.integers(0, 9), st.just(-1.0), st.just(1))),
)
LAST = {"finish_reason": "error", "stop_reason": 7, "error": "why"}


@given(several=st.lists(OUTPUTS, min_size=1, max_size=5), read_after=st.sets(st.integers(0, 4)))
def test_merged_outputs_say_what_they_said_one_by_one(
    several: list[CoreOutput], read_after: set[int]
) -> None:
    """Every field, however late somebody reads them."""
    for output in several:
        output.scores = [TokenScore(token, -float(token), 1) for token in output.token_ids]
    several[-1] = msgspec.structs.replace(several[-1], **LAST)
    stream = Stream(["a"], lambda names: None)
    read: list[CoreOutput] = []
    for place, output in enumerate(several):
        stream.push(msgspec.convert(msgspec.to_builtins(output), CoreOutput))
        if place in read_after:
            read += stream.waiting()
    read += stream.waiting()
    for name in ("token_ids", "scores", "prompt_scores"):
        told = [[each for output in outputs for each in getattr(output, name)]
                for outputs in (read, several)]  # fmt: skip
        assert told[0] == told[1], name
    for name in ("num_cached_tokens", "first_scheduled"):  # told once, and not taken back
        most = [
            max(getattr(output, name) or 0 for output in outputs) for outputs in (read, several)
        ]
        assert most[0] == most[1], name
    assert {name: getattr(read[-1], name) for name in LAST} == LAST


@pytest.mark.parametrize(("n", "names"), [(1, ["a"]), (3, ["a/0", "a/1", "a/2"])])
def test_a_request_has_one_id_and_one_list_of_its_prompt(n: int, names: list[str]) -> None:
    prepared = PreparedParams(SamplingParams(n=n, temperature=1.0), None)
    prompt = [1, 2, 3]
    found = RequestOutputState("a", None, prompt, prepared)
    requests = list(prepared.core_requests(found, []))
    assert [request.request_id for request in requests] == names
    assert all(request.prompt_token_ids is prompt for request in requests)
    found.fail("why")
    assert {completion.error for completion in found.output.outputs} == {"request 'a': why"}
    assert found.to_stop() == names


def test_what_was_cached_is_not_forgotten(tokenizer: Tokenizer) -> None:
    found = RequestOutputState(
        "a", None, [1], PreparedParams(SamplingParams(max_tokens=9), tokenizer)
    )
    for cached in (0, 32, 0):
        found.update(CoreOutput(request_id="a", num_cached_tokens=cached))
    assert found.output.num_cached_tokens == 32


def test_a_failure_leaves_what_has_ended() -> None:
    """One of two sequences has ended: its end stays, and the core is not asked to end it."""
    found = RequestOutputState("a", None, [1], PreparedParams(SamplingParams(n=2), None))
    score = TokenScore(5, -1.0, 1)
    found.update(
        CoreOutput(request_id="a/0", token_ids=[5], scores=[score], finish_reason="length")
    )
    found.fail("why")
    first, second = found.output.outputs
    assert (first.finish_reason, first.error) == ("length", None)
    assert (second.finish_reason, second.error) == ("error", "request 'a': why")
    assert found.to_stop() == ["a/1"]
    assert found.to_stop() == []
