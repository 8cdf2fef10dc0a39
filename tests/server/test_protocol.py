"""Requests of the OpenAI endpoints: what is read, and which field an error names."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion_stream_options_param import (
    ChatCompletionStreamOptionsParam as StreamOptions,
)
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsBase as ChatCreateParams,
)
from openai.types.completion_create_params import (
    CompletionCreateParamsBase as CompletionCreateParams,
)

from trueline.engine.params import REALS, WHOLES, SamplingParams
from trueline.errors import UsageError
from trueline.server.protocol import (
    ApiError,
    RequestLimits,
    chat_prompt,
    completion_prompts,
    detokenize,
    openapi,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
    tokenize,
    tokenizer_info,
)
from trueline.server.protocol.bodies import SAMPLING, ChatBody, CompletionBody, Ignored
from trueline.text.chat import check_messages
from trueline.text.template_process import TemplateProcess
from trueline.text.tokenizer import Tokenizer
from trueline.tiny.tokenizer import write_tokenizer

LIMITS = RequestLimits(models=("tiny", "alias"), max_model_len=64, vocab_size=300, max_sequences=40)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 300, 256, [257])
    return Tokenizer.load(directory)


def completion(limits: RequestLimits = LIMITS, **fields: Any) -> Any:
    return read_completion(json.dumps({"prompt": "a"} | fields).encode(), limits)


def chat(limits: RequestLimits = LIMITS, **fields: Any) -> Any:
    return read_chat(json.dumps({"messages": MESSAGES} | fields).encode(), limits)


def refused(read: Callable[..., Any], *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(*args, **fields)
    error = caught.value
    shown = json.loads(error.body())["error"]
    assert shown == {
        "message": error.message, "type": error.type, "param": error.param, "code": error.code
    }  # fmt: skip
    return error


BAD_BOTH: list[tuple[str, Any, str, str]] = [
    ("n", 0, "n", "a whole number from 1"),
    ("n", True, "n", "found true or false; accepted: a whole number"),
    ("n", 1.5, "n", "found a number"),
    ("n", "1", "n", "found a text"),
    ("n", 41, "n", "up to 40 sequences"),
    ("temperature", -0.1, "temperature", "0 for greedy"),
    ("temperature", "hot", "temperature", "found a text; accepted: 0 for greedy"),
    ("top_p", 0, "top_p", "above 0"),
    ("top_p", 1.1, "top_p", "up to 1"),
    ("top_k", -2, "top_k", "0 or -1 for all"),
    ("min_p", 2, "min_p", "0 to 1"),
    ("repetition_penalty", 0, "repetition_penalty", "0.001 to 1000"),
    ("presence_penalty", 3, "presence_penalty", "-2 to 2"),
    ("frequency_penalty", -3, "frequency_penalty", "-2 to 2"),
    ("seed", 2**63, "seed", "64 bits"),
    ("seed", "7", "seed", "64 bits"),
    ("stop", "", "stop", "not empty"),
    ("stop", ["a", ""], "stop[1]", "not empty"),
    ("stop", 5, "stop", "found a whole number"),
    ("stop_token_ids", [-1], "stop_token_ids[0]", "token ids"),
    ("stop_token_ids", [300], "stop_token_ids", "below 300"),
    ("stop_token_ids", 3, "stop_token_ids", "a list of token ids"),
    ("allowed_token_ids", [], "allowed_token_ids", "at least one"),
    ("allowed_token_ids", [999], "allowed_token_ids", "below 300"),
    ("bad_words", [" "], "bad_words[0]", "white space"),
    ("logit_bias", {"x": 1}, "logit_bias", "token ids and numbers"),
    ("logit_bias", {"4": 101}, "logit_bias", "-100 to 100"),
    ("logit_bias", {"300": 1}, "logit_bias", "below 300"),
    ("logit_bias", [1], "logit_bias", "token ids and numbers"),
    ("min_tokens", -1, "min_tokens", "from 0 up"),
    ("ignore_eos", 1, "ignore_eos", "true or false"),
    ("skip_special_tokens", "no", "skip_special_tokens", "true or false"),
    ("include_stop_str_in_output", 0, "include_stop_str_in_output", "true or false"),
    ("prompt_logprobs", 21, "prompt_logprobs", "up to 20; --max-logprobs"),
    ("prompt_logprobs", -1, "prompt_logprobs", "all 300 tokens: accepted: up to 20"),
    ("prompt_logprobs", -2, "prompt_logprobs", "-1 for all where that is -1"),
    ("priority", 1.5, "priority", "whole number"),
    ("priority", 2**63, "priority", "64 bits"),
    ("cache_salt", "", "cache_salt", "not empty"),
    ("stream", "yes", "stream", "true or false"),
    ("stream_options", {}, "stream_options", "where stream is true"),
    ("stream_options", {"include_usage": 3}, "stream_options.include_usage", "true or false"),
    ("stream_options", {"usage": True}, "stream_options.usage", "not known"),
    ("return_token_ids", [], "return_token_ids", "true or false"),
    ("return_tokens_as_token_ids", 1, "return_tokens_as_token_ids", "true or false"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens", "from 1 up, or -1"),
    ("truncate_prompt_tokens", -2, "truncate_prompt_tokens", "from 1 up, or -1"),
    ("truncate_prompt_tokens", True, "truncate_prompt_tokens", "from 1 up, or -1"),
    ("model", 5, "model", "found a whole number; accepted: a text"),
    ("temprature", 1, "temprature", "nearest known name is 'temperature'"),
    ("use_beam_search", True, "use_beam_search", "not offered yet; accepted: null or false"),
    ("guided_json", 1, "guided_json", "accepted: a JSON schema, or its text"),
    ("guided_decoding_backend", "x", "guided_decoding_backend", "not known"),
    ("verbosity", "low", "verbosity", "not offered yet; accepted: null or"),
    ("modalities", ["text", "audio"], "modalities", 'not offered yet; accepted: null or ["text"]'),
    ("modalities", [], "modalities", "not offered yet"),
    ("functions", [{"name": "f"}], "functions", "not offered yet"),
    ("function_call", {"name": "f"}, "function_call", "not offered yet"),
    ("prediction", {"type": "content"}, "prediction", "not offered yet"),
]
BAD_COMPLETION = [
    ("prompt", None, "prompt", "a text"),
    ("prompt", 5, "prompt", "a list of token ids"),
    ("prompt", [], "prompt", "empty list"),
    ("prompt", [[1], []], "prompt", "prompt[1]: found an empty list"),
    ("prompt", ["a", 1], "prompt", "texts alone"),
    ("prompt", ["a", 1.5], "prompt[1]", "found a number"),
    ("prompt", [1, 300], "prompt", "below 300"),
    ("prompt", [[1], [2, 999]], "prompt[1]", "below 300"),
    ("prompt", [[1, -2]], "prompt[0][1]", "token ids"),
    ("prompt", ["a"] * 41, "prompt", "up to 40 sequences"),
    ("logprobs", True, "logprobs", "a whole number"),
    ("logprobs", 21, "logprobs", "up to 20"),
    ("max_tokens", -1, "max_tokens", "0 for scores"),
    ("best_of", 2, "best_of", "n, which is 1"),
    ("suffix", "x", "suffix", "not offered yet"),
    ("echo", "x", "echo", "true or false"),
    ("min_tokens", 17, "min_tokens", "max_tokens, which is 16"),
    ("messages", MESSAGES, "messages", "not known"),
    ("reasoning_effort", "low", "reasoning_effort", "not known"),
    ("max_completion_tokens", 5, "max_completion_tokens", "not known"),
]
BAD_CHAT = [
    ("messages", [], "messages", "at least one message"),
    ("messages", "hi", "messages", "found a text; accepted: a list"),
    ("messages", ["hi"], "messages[0]", "found a text"),
    ("logprobs", 5, "logprobs", "true or false"),
    ("top_logprobs", 5, "top_logprobs", "where logprobs is true"),
    ("max_tokens", 0, "max_tokens", "from 1 up"),
    ("max_completion_tokens", 0, "max_completion_tokens", "from 1 up"),
    ("tools", [{"type": "function"}], "tools[0].function", "is missing"),
    ("tool_choice", "required", "tool_choice", "with tools to choose from"),
    ("tool_choice", {"type": "function"}, "tool_choice.function", "is missing"),
    ("response_format", {"type": "yaml"}, "response_format.type", "Invalid value 'yaml'"),
    ("response_format", {"json_schema": {}, "type": "text"}, "response_format.json_schema", ""),
    ("chat_template", "x", "chat_template", "--trust-request-chat-template"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages", "request itself"),
    ("chat_template_kwargs", [], "chat_template_kwargs", "an object"),
    ("parallel_tool_calls", "no", "parallel_tool_calls", "true or false"),
    ("include_reasoning", 1, "include_reasoning", "true or false"),
    ("reasoning_effort", "", "reasoning_effort", "a level that the model's chat template knows"),
    ("thinking_token_budget", -1, "thinking_token_budget", "a whole number of tokens from 0"),
    ("thinking_budget", 1.5, "thinking_budget", "a whole number of tokens from 0"),
    ("prompt", "a", "prompt", "not known"),
    ("echo", True, "echo", "not known"),
]


@pytest.mark.parametrize(("field", "value", "param", "says"), BAD_BOTH + BAD_COMPLETION)
def test_bad_completion(field: str, value: Any, param: str, says: str) -> None:
    error = refused(completion, **{field: value})
    assert (error.status, error.param, error.type) == (400, param, "invalid_request_error")
    assert says in error.message


@pytest.mark.parametrize(("field", "value", "param", "says"), BAD_BOTH + BAD_CHAT)
def test_bad_chat(field: str, value: Any, param: str, says: str) -> None:
    error = refused(chat, **{field: value})
    assert (error.status, error.param) == (400, param)
    assert says in error.message


def test_fields_that_do_not_go_together() -> None:
    assert refused(completion, n=2, temperature=0).param == "n"
    assert refused(completion, max_tokens=0, min_tokens=1).param == "min_tokens"
    assert refused(completion, n=2, best_of=1).param == "best_of"
    assert refused(chat, max_tokens=3, max_completion_tokens=4).param == "max_completion_tokens"
    both = refused(chat, add_generation_prompt=True, continue_final_message=True)
    assert both.param == "continue_final_message"
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert completion(n=2, best_of=2).params.n == 2
    assert chat(max_tokens=3, max_completion_tokens=3).params.max_tokens == 3


NOT_JSON = [
    (b"", "line 1, column 1"),
    (b"{", "line 1, column 2"),
    (b'{"prompt": "a",\n "n": }', "line 2, column 7"),
    (b'{"prompt": "a"} x', "column 17"),
    (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": NaN}', "not JSON"),
    (b"[]", "found a list; accepted: a JSON object"),
    (b'"a"', "found a text"),
    (b'{"prompt": "a", "user": ' + b"[" * 20_000, "nested too deep"),
    (b'{"prompt": "a", "user": ' + b"[" * 100_000, "100001 lists and objects"),
    (b'{"prompt": "a", "user": "' + b"x" * 5000, "not JSON"),
]


@pytest.mark.parametrize(("body", "says"), NOT_JSON, ids=range(len(NOT_JSON)))
def test_not_json(body: bytes, says: str) -> None:
    error = refused(read_completion, body, LIMITS)
    assert (error.status, error.param) == (400, None)
    assert says in error.message


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_refused_politely(body: bytes) -> None:
    for read in (read_completion, read_chat, read_tokenize, read_detokenize):
        with pytest.raises(ApiError):
            read(body, LIMITS)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(st.sampled_from(CompletionBody.__struct_fields__), _JSON)
def test_any_value_is_read_or_its_field_named(field: str, value: Any) -> None:
    body = msgspec.json.encode({"prompt": "a", field: value})
    try:
        read_completion(body, LIMITS)
    except ApiError as error:
        assert error.status in (400, 404)
        if "surrogate" not in error.message:
            assert error.param is not None
            assert error.param.startswith(field)


def test_every_sampling_field_arrives() -> None:
    values: dict[str, Any] = {
        "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "logit_bias": {"7": -1.5}, "seed": 11, "stop": "end", "stop_token_ids": [4],
        "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9, "min_tokens": 2,
        "logprobs": 4, "prompt_logprobs": 2, "bad_words": ["x"], "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
    }  # fmt: skip
    assert set(values) == set(SAMPLING)
    assert completion(**values).params == SamplingParams.from_mapping(values)
    told = chat(**values | {"logprobs": True, "top_logprobs": 4})
    assert told.params == SamplingParams.from_mapping(values)


@pytest.mark.parametrize("bound", [*REALS, *WHOLES], ids=lambda bound: bound[0])
def test_bounds_are_taken(bound: tuple[Any, ...]) -> None:
    """The very numbers that SamplingParams says are accepted."""
    name, low, high, *_ = bound
    free = msgspec.structs.replace(LIMITS, max_logprobs=-1, max_sequences=high, max_model_len=2**64)
    for value in (low, high):
        if value != math.inf and value <= (LIMITS.vocab_size if "logprobs" in name else high):
            more = {"max_tokens": value} if name == "min_tokens" and value else {}
            read = completion(free, **{name: value} | more)
            all_of_them = "logprobs" in name and value == -1
            assert getattr(read.params, name) == (LIMITS.vocab_size if all_of_them else value)


def test_defaults_are_openais() -> None:
    request = completion()
    assert request.params == SamplingParams(max_tokens=16)
    assert (request.model, request.prompts, request.echo) == ("tiny", ("a",), False)
    assert (request.stream, request.include_usage, request.logprobs) == (False, False, None)
    assert chat().params == SamplingParams(max_tokens=None)
    assert chat().conversation.add_generation_prompt
    assert chat(continue_final_message=True).conversation.add_generation_prompt is False


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_null_is_absent_and_harmless_fields_are_ignored(body: Any) -> None:
    read, needed = (completion, "prompt") if body is CompletionBody else (chat, "messages")
    nulls = dict.fromkeys(set(body.__struct_fields__) - {needed})
    assert read(**nulls) == read()
    ignored = {name: {"any": ["thing"]} for name in Ignored.__struct_fields__}
    assert {"user", "metadata", "store", "service_tier"} <= set(ignored)
    assert read(**ignored) == read()
    nothing = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "functions": [],
        "function_call": "none", "modalities": ["text"], "verbosity": "medium",
        "use_beam_search": False,
    }  # fmt: skip
    assert read(**nothing) == read()
    assert chat(include_reasoning=True) == chat()
    for either in (True, False):  # of no tools, none are called at once
        assert read(parallel_tool_calls=either) == read()
    assert chat(top_logprobs=0, logprobs=False) == chat()
    options = {"include_obfuscation": False, "include_usage": None}
    assert read(stream=True, stream_options=options) == read(stream=True)


@pytest.mark.parametrize("kind", [CompletionCreateParams, ChatCreateParams])
def test_every_field_of_the_official_client_may_be_null(kind: Any) -> None:
    """Of both requests in both endpoints: some SDKs have one object for all."""
    fields = set(kind.__annotations__) - {"prompt", "messages"}
    assert len(fields) > 14
    for read, body in ((completion, CompletionBody), (chat, ChatBody)):
        for field in fields & set(body.__struct_fields__):
            assert read(**{field: None}) == read(), field
    read, body = (
        (completion, CompletionBody) if "prompt" in kind.__annotations__ else (chat, ChatBody)
    )
    assert fields <= set(body.__struct_fields__)
    options = dict.fromkeys(StreamOptions.__annotations__)
    assert read(stream=True, stream_options=options) == read(stream=True)


def test_other_fields_arrive() -> None:
    request = completion(
        model="alias", stream=True, stream_options={"include_usage": True}, priority=-3,
        cache_salt="s", return_token_ids=True, echo=True, logprobs=3, prompt_logprobs=1,
    )  # fmt: skip
    assert (request.model, request.stream, request.include_usage) == ("alias", True, True)
    assert (request.priority, request.cache_salt, request.continuous_usage) == (-3, "s", False)
    assert (request.return_token_ids, request.echo) == (True, True)
    # an echo is scored, with as many as the most that is asked for
    assert (request.logprobs, request.prompt_logprobs) == (3, 1)
    assert (request.params.logprobs, request.params.prompt_logprobs) == (3, 3)
    assert completion(logprobs=3).params.prompt_logprobs is None
    assert chat(logprobs=True).logprobs == chat(logprobs=True, top_logprobs=0).logprobs == 0
    assert chat(logprobs=False).params.logprobs is None


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("each", [None, False, True])
def test_usage_in_every_chunk_only_with_usage(asked: bool | None, each: bool | None) -> None:
    options = {"include_usage": asked, "continuous_usage_stats": each}
    request = completion(stream=True, stream_options=options)
    assert (request.include_usage, request.continuous_usage) == (bool(asked), bool(asked and each))


def test_scoring_asks_the_engine_for_one_token() -> None:
    request = completion(max_tokens=0, echo=True, logprobs=1)
    assert (request.generates, request.params.max_tokens) == (False, 1)
    assert completion(max_tokens=1).generates


def test_kinds_of_prompts() -> None:
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


def test_all_logprobs_where_there_is_no_limit() -> None:
    free = msgspec.structs.replace(LIMITS, max_logprobs=-1)
    assert completion(free, logprobs=-1).logprobs == 300
    assert refused(completion, free, logprobs=301).param == "logprobs"


def test_whole_numbers_may_have_a_point() -> None:
    told = completion(n=2.0, prompt=[[5.0, 6]], logit_bias={"7": 3}, temperature=1.0)
    assert told == completion(n=2, prompt=[[5, 6]], logit_bias={"7": 3})
    request = chat(n=2.0, chat_template_kwargs={"x": 1.0})
    assert type(request.conversation.chat_template_kwargs["x"]) is float
    assert refused(completion, n=2.5, logprobs=2.0).param == "n"


def test_models() -> None:
    error = refused(completion, model="tinny")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert "nearest known name is 'tiny'" in error.message


def test_completion_prompts(tokenizer: Tokenizer) -> None:
    request = completion(prompt=["héy", "b"])
    (text, ids), _ = completion_prompts(request, tokenizer, LIMITS)
    assert text == tokenizer.decode(ids, False) == "héy"
    assert completion_prompts(completion(prompt=[[5, 6]]), tokenizer, LIMITS) == [(None, [5, 6])]
    error = refused(completion_prompts, completion(prompt=["a", ""]), tokenizer, LIMITS)
    assert (error.status, error.param) == (400, "prompt[1]")
    completion_prompts(completion(prompt="x" * 63), tokenizer, LIMITS)
    error = refused(completion_prompts, completion(prompt="x" * 64), tokenizer, LIMITS)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("num_prompt", [1, 30, 63])
def test_an_answer_longer_than_there_is_room_for(tokenizer: Tokenizer, num_prompt: int) -> None:
    room = LIMITS.max_model_len - num_prompt

    def prompts(**fields: Any) -> Any:
        request = completion(prompt=[5] * num_prompt, **fields)
        return completion_prompts(request, tokenizer, LIMITS)

    for fields in ({"max_tokens": room}, {"max_tokens": None}, {"max_tokens": 0}, {}):
        prompts(**fields)
    prompts(max_tokens=room, min_tokens=room)
    for asked in (room + 1, 2**40):
        error = refused(prompts, max_tokens=asked)
        assert (error.status, error.param) == (400, "max_tokens")
        assert error.code == "context_length_exceeded"
        told = f"the prompt has {num_prompt} tokens, and max_model_len = 64 leaves {room}"
        assert (told if asked < 64 else "up to 63, which leaves one") in error.message
    ids = chat_prompt(chat(), tokenizer, LIMITS)[1]
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        room = LIMITS.max_model_len - len(ids)
        chat_prompt(chat(**{name: room}), tokenizer, LIMITS)
        error = refused(chat_prompt, chat(**{name: room + 1}), tokenizer, LIMITS)
        assert (error.param, error.code) == (name, "context_length_exceeded")


@pytest.mark.parametrize("num_prompt", [3, 59, 60, 61, 64, 90])
@pytest.mark.parametrize("most", [1, 59, 60, 61, -1])
@pytest.mark.parametrize("answer", [None, 0, 1, 4])
def test_a_prompt_is_truncated_from_its_beginning(
    tokenizer: Tokenizer, num_prompt: int, most: int, answer: int | None
) -> None:
    ids = [5 + i % 7 for i in range(num_prompt)]
    fields = {"truncate_prompt_tokens": most, "max_tokens": answer}
    request = completion(prompt=ids, **fields)
    room = 64 - (request.params.max_tokens or 1)
    kept = room if most == -1 else most
    if min(num_prompt, kept) > (63 if answer is None else room):
        error = refused(completion_prompts, request, tokenizer, LIMITS)
        assert error.code == "context_length_exceeded"
        return
    assert completion_prompts(request, tokenizer, LIMITS) == [(None, ids[-kept:])]
    text = "x" * num_prompt
    whole = tokenizer.encode(text)
    found, cut = completion_prompts(completion(prompt=text, **fields), tokenizer, LIMITS)[0]
    assert cut == whole[-kept:]
    assert found == (text if cut == whole else None)


def test_a_truncated_chat_and_its_limits(tokenizer: Tokenizer) -> None:
    whole = chat_prompt(chat(), tokenizer, LIMITS)[1]
    text, ids = chat_prompt(chat(truncate_prompt_tokens=4), tokenizer, LIMITS)
    assert (text, ids) == (None, whole[-4:])
    # more than the model's length, but not more than what is ever encoded
    longest = tokenizer.vocabulary.longest_bytes
    assert longest is not None
    long = longest * LIMITS.max_values + 1
    for request in (completion(prompt="x" * 200, truncate_prompt_tokens=9),
                    completion(prompt=[5] * 200, truncate_prompt_tokens=9)):  # fmt: skip
        assert len(completion_prompts(request, tokenizer, LIMITS)[0][1]) == 9
    error = refused(
        completion_prompts, completion(prompt="x" * long, truncate_prompt_tokens=9), tokenizer,
        LIMITS,
    )  # fmt: skip
    assert (error.param, "accepted: up to" in error.message) == ("prompt", True)


def test_tokenizer_info(tokenizer: Tokenizer) -> None:
    told = json.loads(tokenizer_info(tokenizer, LIMITS))
    assert told == {
        "vocab_size": tokenizer.vocab_size, "model_max_length": 64,
        "bos_token": tokenizer.special_tokens["bos_token"],
        "eos_token": tokenizer.special_tokens["eos_token"],
        "pad_token": tokenizer.special_tokens.get("pad_token"),
        "chat_template": tokenizer.chat_template(),
    }  # fmt: skip
    assert tokenizer.encode(told["bos_token"], False) == [tokenizer.bos_id]


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    text, ids = chat_prompt(chat(), tokenizer, LIMITS)
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert tokenizer.decode(ids, False) == text
    assert ids[0] == tokenizer.bos_id
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert chat_prompt(chat(messages=parts), tokenizer, LIMITS) == (text, ids)
    bare, _ = chat_prompt(chat(add_generation_prompt=False), tokenizer, LIMITS)
    assert bare == "<|begin|><|user|>hi<|end|>"


@pytest.mark.parametrize("content", ["so ", [{"type": "text", "text": "so "}], ["so "]])
def test_the_last_message_goes_on(tokenizer: Tokenizer, content: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    request = chat(messages=messages, continue_final_message=True)
    text, _ = chat_prompt(request, tokenizer, LIMITS)
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>so "


BAD_MESSAGES = [
    ([{"role": "user"}], "messages[0].content", "missing"),
    ([{"content": "x"}], "messages[0].role", "accepted: a name"),
    ([*MESSAGES, {"role": "user", "content": 5}], "messages[1].content", "a text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]", "image_url"),
    ([{"role": "robot", "content": "x"}], "messages", "role robot is not known"),
    ([{"role": "user", "content": "x" * 64}], "messages", "64"),
]


@pytest.mark.parametrize(("messages", "param", "says"), BAD_MESSAGES)
def test_bad_messages(tokenizer: Tokenizer, messages: Any, param: str, says: str) -> None:
    error = refused(chat_prompt, chat(messages=messages), tokenizer, LIMITS)
    assert (error.status, error.param) == (400, param)
    assert says in error.message


def test_deep_messages(tokenizer: Tokenizer) -> None:
    deep = b"[" * 700 + b"]" * 700
    body = b'{"messages": [{"role": "user", "content": "a", "x": ' + deep + b"}]}"
    assert refused(chat_prompt, read_chat(body, LIMITS), tokenizer, LIMITS).param == "messages"


def test_templates_of_requests(tokenizer: Tokenizer) -> None:
    trusting, process = msgspec.structs.replace(LIMITS, request_templates=True), TemplateProcess()
    fields = {"chat_template": "{{ bos_token }}{{ x }}", "chat_template_kwargs": {"x": "y"}}
    assert chat_prompt(chat(trusting, **fields), tokenizer, LIMITS, process)[0] == "<|begin|>y"
    special = {"chat_template": "{{ bos_token }}", "chat_template_kwargs": {"bos_token": "mine"}}
    assert chat_prompt(chat(trusting, **special), tokenizer, LIMITS, process)[0] == "mine"
    blind = chat(trusting, chat_template="x", continue_final_message=True, messages=MESSAGES)
    assert refused(chat_prompt, blind, tokenizer, LIMITS, process).param == "continue_final_message"
    broken = chat(trusting, chat_template="{{ 1 / 0 }}")
    assert refused(chat_prompt, broken, tokenizer, LIMITS, process).param == "messages"
    empty = chat(trusting, chat_template="{{ '' }}")
    assert refused(chat_prompt, empty, tokenizer, LIMITS, process).param == "messages"
    process.close()


def test_tokenize_and_back(tokenizer: Tokenizer) -> None:
    request = read_tokenize('{"prompt": "h€", "return_token_strs": true}'.encode(), LIMITS)
    found = json.loads(tokenize(request, tokenizer, LIMITS))
    assert (found["count"], found["max_model_len"], len(found["tokens"])) == (4, 64, 4)
    assert found["token_strs"] == ["h", "\ufffd", "\ufffd", "\ufffd"]
    back = read_detokenize(json.dumps({"tokens": found["tokens"]}).encode(), LIMITS)
    assert json.loads(detokenize(back, tokenizer)) == {"prompt": "h€"}
    messages = read_tokenize(json.dumps({"messages": MESSAGES}).encode(), LIMITS)
    found = json.loads(tokenize(messages, tokenizer, LIMITS))
    assert found["tokens"] == chat_prompt(chat(), tokenizer, LIMITS)[1]
    assert found["token_strs"] is None
    for body, param in [
        ("{}", "prompt"),
        ('{"prompt": 5}', "prompt"),
        ('{"messages": 1}', "messages"),
    ]:
        assert refused(read_tokenize, body.encode(), LIMITS).param == param
    for tokens, param in [("[300]", "tokens"), ('["a"]', "tokens[0]"), ("[-1]", "tokens[0]")]:
        assert refused(read_detokenize, f'{{"tokens": {tokens}}}'.encode(), LIMITS).param == param


def test_error_types() -> None:
    types = [ApiError(status, "x").type for status in (400, 401, 404, 413, 429, 500, 503)]
    wrong = "invalid_request_error"
    assert types == [
        wrong, "authentication_error", wrong, wrong, "rate_limit_error", "server_error",
        "server_error",
    ]  # fmt: skip
    assert ApiError(400, "é").event() == (
        'data: {"error":{"message":"é","type":"invalid_request_error","param":null,'
        '"code":null}}\n\n'.encode()
    )


POOL: list[Any] = [
    *(True, False, 0, 1, -1, -2, 2, 16, 20, 21, 40, 41, 299, 300, 2**63 - 1, 2**63, -(2**63)),
    *(
        -(2**63) - 1,
        0.0,
        2.0,
        300.0,
        1e30,
        0.5,
        -0.5,
        2.5,
        1e300,
        "",
        "a",
        " ",
        "none",
        "tiny",
        "null",
        [],
        [""],
    ),
    *(
        ["a"],
        ["a", 1],
        [1],
        [2.0],
        [300],
        [-1],
        [[1]],
        [[]],
        [[300]],
        [[1], "a"],
        [None],
        {},
        {"1": 1},
    ),
    *({"01": 1}, {"a": 1}, {"1": 101}, {"type": "text"}, {"type": "json_object"}),
    *({"include_usage": True}, {"include_usage": None}, {"include_usage": 1}, [" "]),
    *(MESSAGES, [{"role": "user"}], [{"role": "assistant"}], [{"role": ""}]),
]
# what one field cannot tell
TOGETHER = {"stream_options", "top_logprobs", "best_of", "min_tokens"}


@pytest.mark.parametrize("kind", ["CompletionBody", "ChatBody"])
def test_the_schema_takes_what_is_read(kind: str) -> None:
    """And nothing else: every field with every value of a pool."""
    document = openapi(LIMITS)
    schema = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
    validator = jsonschema_rs.Draft202012Validator(schema)
    body: Any = CompletionBody if kind == "CompletionBody" else ChatBody
    base: dict[str, Any] = {"prompt": "a"} if kind == "CompletionBody" else {"messages": MESSAGES}
    for field in (*body.__struct_fields__, "unknown"):
        for value in POOL:
            asked = base | {field: value}
            try:
                if kind == "CompletionBody":
                    completion(**asked)
                else:
                    check_messages(chat(**asked).conversation.messages)
                reads = True
            except (ApiError, UsageError):
                reads = False
            if field in TOGETHER and not reads:
                continue
            if field == "logit_bias" and value == {"01": 1}:
                continue  # read as 1, but not advertised
            assert validator.is_valid(asked) == reads, (field, value)


def test_openapi_document() -> None:
    document = openapi(LIMITS)
    assert set(document["paths"]) >= {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize",
        "/version", "/health", "/health/live", "/health/ready", "/metrics",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    assert schemas["ChatBody"]["required"] == ["messages"]
    assert schemas["ChatBody"]["additionalProperties"] is False
    post = document["paths"]["/v1/chat/completions"]["post"]
    assert set(post["responses"]) >= {"200", "400", "401", "404", "413", "429", "503"}
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert post["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]
    assert "security" not in json.dumps(openapi(LIMITS, with_keys=False))
    names = set(schemas)
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names


def test_schemathesis_reads_the_document() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    operations = list(schemathesis.openapi.from_dict(openapi(LIMITS)).get_all_operations())
    assert len(operations) == len(openapi(LIMITS)["paths"])
    assert all(operation.ok() for operation in operations)


def test_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nimport trueline.server.protocol\n"
        "assert 'starlette' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_house_has_one_list_of_ignored_fields() -> None:
    source = Path(sys.modules["trueline.server.protocol.bodies"].__file__ or "").parent
    found = [file.name for file in source.glob("*.py") if "service_tier" in file.read_text()]
    assert found == ["bodies.py"]
