"""Sampling parameters: names and defaults of vLLM, and errors that say what is accepted."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.engine.params import MAX_N, SamplingParams, sequence_seed
from trueline.errors import UsageError


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1, 1.0, 1.0, 0, 0.0
    )  # fmt: skip
    assert params.repetition_penalty == 1.0
    assert params.presence_penalty == params.frequency_penalty == 0.0
    assert params.max_tokens == 16
    assert params.min_tokens == 0
    assert params.seed is params.logprobs is params.prompt_logprobs is params.logit_bias is None
    assert params.allowed_token_ids is None
    assert params.stop == params.stop_token_ids == params.bad_words == ()
    assert params.skip_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output
    assert not params.is_greedy


def test_normalised() -> None:
    params = SamplingParams(
        temperature=1,
        stop="end",
        stop_token_ids=[3, 3, 1],
        allowed_token_ids=[5],
        bad_words=["x"],
        logit_bias={"7": 1, 8: -2.5},  # type: ignore[dict-item]
        seed=-1,
        max_tokens=None,
    )
    assert type(params.temperature) is float
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 1)
    assert params.allowed_token_ids == (5,)
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert params.seed is None
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(seed=-2).seed == -2
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy


BAD: list[tuple[str, Any, str]] = [
    ("n", 0, "a whole number from 1"),
    ("n", MAX_N + 1, str(MAX_N)),
    ("n", 1.0, "a whole number"),
    ("n", True, "a whole number"),
    ("n", None, "a whole number"),
    ("temperature", -0.1, "0 for greedy"),
    ("temperature", math.nan, "0 for greedy"),
    ("temperature", math.inf, "0 for greedy"),
    ("temperature", 10**400, "0 for greedy"),
    ("temperature", "hot", "0 for greedy"),
    ("temperature", None, "0 for greedy"),
    ("temperature", True, "0 for greedy"),
    ("top_p", 0.0, "above 0, up to 1"),
    ("top_p", 1.01, "above 0, up to 1"),
    ("top_p", math.nan, "above 0"),
    ("top_k", -2, "0 or -1 for all"),
    ("top_k", 2.5, "0 or -1 for all"),
    ("min_p", -0.1, "0 to 1"),
    ("min_p", 1.1, "0 to 1"),
    ("repetition_penalty", 0.0, "0.001 to 1000"),
    ("repetition_penalty", -1, "0.001 to 1000"),
    ("repetition_penalty", math.inf, "0.001 to 1000"),
    ("presence_penalty", 2.1, "-2 to 2"),
    ("frequency_penalty", math.nan, "-2 to 2"),
    ("logit_bias", {1: 101}, "-100 to 100"),
    ("logit_bias", {1: math.inf}, "token ids and numbers"),
    ("logit_bias", {1: math.nan}, "token ids and numbers"),
    ("logit_bias", {-1: 1}, "token ids and numbers"),
    ("logit_bias", {"x": 1}, "token ids and numbers"),
    ("logit_bias", {1: None}, "token ids and numbers"),
    ("logit_bias", [(1, 2)], "token ids and numbers"),
    ("seed", 2**63, "64 bits"),
    ("seed", 1.5, "64 bits"),
    ("stop", [""], "not empty"),
    ("stop", "", "not empty"),
    ("stop", [1], "a list of texts"),
    ("stop", 5, "a list of texts"),
    ("stop", None, "a list of texts"),
    ("stop", {"a"}, "a list of texts"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("stop_token_ids", [-1], "a list of token ids"),
    ("stop_token_ids", [True], "a list of token ids"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", ["a"], "a list of token ids"),
    ("bad_words", ["ok", ""], "not empty"),
    ("bad_words", [" \n"], "more than white space"),
    ("bad_words", "word", "a list of texts"),
    ("max_tokens", 0, "from 1 up, or None"),
    ("max_tokens", "16", "from 1 up, or None"),
    ("min_tokens", -1, "from 0 up"),
    ("min_tokens", 17, "at most max_tokens, which is 16"),
    ("logprobs", -2, "-1 for all"),
    ("logprobs", True, "-1 for all"),
    ("prompt_logprobs", 1.5, "-1 for all"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("include_stop_str_in_output", "yes", "True or False"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), BAD)
def test_refuses(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} = ")
    assert accepted in message


def test_the_value_found_is_named() -> None:
    with pytest.raises(UsageError, match=r"top_p = 1\.5: accepted: above 0, up to 1"):
        SamplingParams(top_p=1.5)
    with pytest.raises(UsageError) as caught:
        SamplingParams(stop=[1] * 1000)  # type: ignore[list-item]
    assert len(str(caught.value)) < 130


def test_greedy_gives_one_sequence() -> None:
    with pytest.raises(UsageError, match=r"n = 2 with temperature = 0: .* the same sequence"):
        SamplingParams(n=2, temperature=0)
    assert SamplingParams(n=2, temperature=0.5).n == 2


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("temprature", "the nearest known name is 'temperature'"),
        ("max_token", "'max_tokens'"),
        ("best_of", "rank them by their logprobs"),
        ("use_beam_search", "draw n instead"),
        ("nonsense", "'nonsense' is not known"),
    ],
)
def test_unknown_names(name: str, part: str) -> None:
    for make in (SamplingParams, lambda **fields: SamplingParams.from_mapping(fields)):
        with pytest.raises(UsageError) as caught:
            make(**{name: 1})
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="given by name"):
        SamplingParams(1)  # type: ignore[misc]


def test_a_request_s_object() -> None:
    fields = {"temperature": None, "stop": None, "max_tokens": None, "seed": None, "n": 3}
    assert SamplingParams.from_mapping(fields) == SamplingParams(n=3, max_tokens=None)
    with pytest.raises(UsageError, match="'nothing'"):
        SamplingParams.from_mapping({"nothing": None})


def test_travels() -> None:
    params = SamplingParams(
        temperature=0.5, stop=["a"], logit_bias={3: 1.5}, allowed_token_ids=[1], seed=7, logprobs=2
    )
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="hot"):
        msgspec.json.decode(b'{"hot": 1}', type=SamplingParams)
    with pytest.raises(UsageError, match="top_p = 3"):
        msgspec.json.decode(b'{"top_p": 3}', type=SamplingParams)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop="a"))


def test_limits_of_the_model() -> None:
    SamplingParams(logprobs=20, allowed_token_ids=[99], logit_bias={99: 1}).check_model(100)
    for fields in (
        {"stop_token_ids": [100]},
        {"allowed_token_ids": [1, 100]},
        {"logit_bias": {100: 1.0}},
    ):
        with pytest.raises(UsageError, match=f"{next(iter(fields))} has token 100.*below 100"):
            SamplingParams(**fields).check_model(100)  # type: ignore[arg-type]
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UsageError, match=f"{name} = 21: accepted: up to 20; --max-logprobs"):
            SamplingParams(**{name: 21}).check_model(100)
        with pytest.raises(UsageError, match=f"{name} = -1"):
            SamplingParams(**{name: -1}).check_model(100)
        SamplingParams(**{name: -1}).check_model(100, max_logprobs=-1)
        SamplingParams(**{name: -1}).check_model(15)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000))
def test_seeds_of_sequences(seed: int, index: int) -> None:
    found = sequence_seed(seed, index)
    assert -(2**63) <= found < 2**63
    assert (found == seed) == (index == 0)


def test_seeds_of_neighbours_differ() -> None:
    seeds = {sequence_seed(seed, index) for seed in range(200) for index in range(1, 50)}
    assert len(seeds) == 200 * 49


def test_needs_no_torch() -> None:
    code = "import sys\nimport trueline.engine.params\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
