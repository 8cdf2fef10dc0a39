"""Answers of the OpenAI endpoints: a stream, joined, is the whole; OpenAI's own types read both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from chat_tokenizers import chat_tokenizer
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.outputs import CompletionOutput, RequestOutput
from trueline.server.answers import ChatAnswers
from trueline.server.protocol import (
    ApiError,
    ChatWriter,
    CompletionWriter,
    ModelCard,
    ModelList,
    RequestLimits,
    chat_prompt,
    completion_prompts,
    openapi,
    read_chat,
    read_completion,
)
from trueline.text.answers import AnswerFormat
from trueline.text.tokenizer import Tokenizer
from trueline.tiny.tokenizer import write_tokenizer

VOCAB = 300
LIMITS = RequestLimits(models=("tiny",), max_model_len=512, vocab_size=VOCAB)
NAMES = ("cmpl-1", 1_700_000_000, "trueline-test")
Output = tuple[int, int, CoreOutput]
"""Prompt, sequence, and what the core has sampled for it."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("thinker"), ["<think>", "</think>"])


def make_tokenizer(directory: Path) -> Tokenizer:
    write_tokenizer(directory, VOCAB, 256, [257])
    return Tokenizer.load(directory)


def score(token: int, top: int) -> TokenScore:
    """Something to tell apart: the likeliest are the tokens after this one."""
    likeliest = [((token + i + 1) % VOCAB, -0.5 - i) for i in range(top)]
    return TokenScore(token, -7.25 - token / 64, top + 1, likeliest)


class Talk:
    """A request, its outputs, and its chunks, fed with made-up outputs."""

    def __init__(self, tokenizer: Tokenizer, kind: str, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        self.writer: CompletionWriter | ChatWriter
        self.again: CompletionWriter | ChatWriter
        if kind == "chat":
            chat = read_chat(body, LIMITS)
            prompts: list[Any] = [chat_prompt(chat, tokenizer, LIMITS)]
            reader = ChatAnswers.of(AnswerFormat(tokenizer), chat, prompts[0][1]).reader
            self.writer, self.again = (ChatWriter(*NAMES, chat, tokenizer) for _ in range(2))
            self.params = chat.params
        else:
            completion, reader = read_completion(body, LIMITS), None
            prompts = list(completion_prompts(completion, tokenizer, LIMITS))
            self.writer, self.again = (
                CompletionWriter(*NAMES, completion, tokenizer) for _ in range(2)
            )
            self.params = completion.params
        self.states = [
            RequestOutputState(str(i), text, ids, PreparedParams(self.params, tokenizer), reader)
            for i, (text, ids) in enumerate(prompts)
        ]

    def output(self, prompt: int, sequence: int, ids: list[int], **more: Any) -> Output:
        top = self.params.logprobs or 0
        state = self.states[prompt]
        output = CoreOutput(
            request_id=state.sequence_ids[sequence],
            token_ids=ids,
            scores=[score(token, top) for token in ids],
            **more,
        )
        return prompt, sequence, output

    def scored(self, prompt: int, sequence: int) -> Output:
        top = self.params.prompt_logprobs or 0
        scores = [score(token, top) for token in self.states[prompt].output.prompt_token_ids[1:]]
        return self.output(prompt, sequence, [], prompt_scores=scores, num_cached_tokens=2)

    def update(self, output: Output) -> list[bytes]:
        self.states[output[0]].update(output[2])
        return list(self.writer.delta(self.outputs()))

    def outputs(self) -> list[RequestOutput]:
        return [state.output for state in self.states]


def payload(chunk: bytes) -> dict[str, Any]:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    found: dict[str, Any] = json.loads(chunk[6:])
    return found


def join_completion(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (new,) = chunk["choices"]
        old = choices.setdefault(
            new["index"], {"text": "", "logprobs": None, "finish_reason": None}
        )
        assert old["finish_reason"] is None, "nothing comes after the end"
        logprobs = new.pop("logprobs")
        if logprobs is not None:
            known = old["logprobs"] or {name: [] for name in logprobs}
            old["logprobs"] = {name: known[name] + logprobs[name] for name in logprobs}
        _extend(old, new, "token_ids")
        old |= new | {"text": old["text"] + new["text"]}
    return choices


def join_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (new,) = chunk["choices"]
        delta = new.pop("delta")
        old = choices.get(new["index"])
        if old is None:
            assert delta == {"role": "assistant", "content": ""}
            old = choices[new["index"]] = {
                "message": {**delta, "refusal": None}, "logprobs": None, "finish_reason": None
            }  # fmt: skip
            delta = {}
        assert old["finish_reason"] is None, "nothing comes after the end"
        for name, text in delta.items():
            old["message"][name] = old["message"].get(name, "") + text
        logprobs = new.pop("logprobs")
        if logprobs is not None:
            known = old["logprobs"]["content"] if old["logprobs"] else []
            old["logprobs"] = {"content": known + logprobs["content"], "refusal": None}
        _extend(old, new, "token_ids")
        old |= new
    return choices


def _extend(old: dict[str, Any], new: dict[str, Any], name: str) -> None:
    if name in new:
        new[name] = old.get(name, []) + new[name]


TEXTS = [
    *("<think>", "</think>"),
    "a",
    "stop",
    "st",
    "op",
    "🦙",
    "漢字",
    "é\n\r\u2028",
    '"\\',
    "\0",
    "<|user|>",
    " ",
    "\ufffd",
]


@st.composite
def requests(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """With n ≥ 2 and scores as often as not."""
    fields: dict[str, Any] = {
        "n": draw(st.integers(1, 3)),
        "stream": True,
        "max_tokens": 50,
        "stop": draw(st.sampled_from([[], ["stop"], ["漢字", "op"], ["🦙"], ["\n"]])),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
        "prompt_logprobs": draw(st.sampled_from([None, 0, 2])),
        "min_tokens": draw(st.sampled_from([0, 0, 4])),
        "stream_options": draw(
            st.sampled_from(
                [
                    None,
                    {"include_usage": True},
                    {"include_usage": True, "continuous_usage_stats": True},
                ]
            )
        ),
    }
    asked = draw(st.sampled_from([None, 0, 2]))
    if kind == "chat":
        content = draw(st.sampled_from(TEXTS)) + "x"
        fields["messages"] = [{"role": "user", "content": content}]
        fields["include_reasoning"] = draw(st.sampled_from([None, None, True, False]))
        if asked is not None:
            fields |= {"logprobs": True, "top_logprobs": asked}
    else:
        texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3)
        ids = st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=2
        )
        fields |= {"prompt": draw(texts | ids), "echo": draw(st.booleans()), "logprobs": asked}
        fields["max_tokens"] = draw(st.sampled_from([50, 50, 50, 0]))
        if not fields["max_tokens"]:
            fields["min_tokens"] = 0
    return fields


@st.composite
def outputs_of_a_sequence(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens in random pieces: of texts, so that characters are cut anywhere, and any others."""
    text = "".join(draw(st.lists(st.sampled_from(TEXTS), max_size=4)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids += draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    ids = ids or [1]
    cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True) if a < b]


def all_outputs(data: st.DataObject, talk: Talk, tokenizer: Tokenizer) -> list[Output]:
    """Of all sequences, in random order but each in its own."""
    queues: list[list[Output]] = []
    for prompt, state in enumerate(talk.states):
        for index in range(len(state.sequence_ids)):
            pieces = data.draw(outputs_of_a_sequence(tokenizer))
            if talk.params.max_tokens == 1:
                pieces = [pieces[0][:1]]
            end = data.draw(st.sampled_from(["length", "stop", "late"]))
            queue = [talk.output(prompt, index, ids) for ids in pieces]
            if end == "late":  # an end without a token
                queue.append(talk.output(prompt, index, [], finish_reason="length"))
            else:
                queue[-1][2].finish_reason = end
                queue[-1][2].stop_reason = 257 if end == "stop" else None
            queues.append([talk.scored(prompt, index), *queue])
    found = []
    while queues:
        queue = data.draw(st.sampled_from(queues))
        found.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return found


@pytest.mark.parametrize("kind", ["completion", "chat"])
@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data())
def test_a_stream_joined_is_the_whole(
    kind: str, tokenizer: Tokenizer, thinker: Tokenizer, data: st.DataObject
) -> None:
    if kind == "chat":
        tokenizer = data.draw(st.sampled_from([tokenizer, thinker]))
    fields = data.draw(requests(kind))
    talk = Talk(tokenizer, kind, fields)
    chunks = [
        payload(chunk)
        for output in all_outputs(data, talk, tokenizer)
        for chunk in talk.update(output)
    ]
    outputs = talk.outputs()
    whole = json.loads(talk.again.whole(outputs))
    check_with_openai(kind, chunks, whole)
    options = fields["stream_options"] or {}
    *last, done = talk.writer.end().split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    if options.get("include_usage"):
        final = payload(last[0] + b"\n\n")
        assert (final["choices"], final["usage"]) == ([], whole["usage"])
        if options.get("continuous_usage_stats"):
            assert chunks[-1]["usage"] == whole["usage"]
        else:
            assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not last
        assert not any("usage" in chunk for chunk in chunks)
    about_prompt = {
        name: value
        for chunk in chunks
        for name, value in chunk.items()
        if name in ("prompt_token_ids", "prompt_logprobs")
    }
    assert about_prompt.items() <= whole.items()
    joined = join_chat(chunks) if kind == "chat" else join_completion(chunks)
    assert [joined[i] for i in range(len(joined))] == whole["choices"]
    check_content(kind, fields, outputs, whole, tokenizer)


def check_content(
    kind: str,
    fields: dict[str, Any],
    outputs: list[RequestOutput],
    whole: dict[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """The whole says what the outputs do, numbered by prompt, then sequence."""
    pairs = [(output, sequence) for output in outputs for sequence in output.outputs]
    shown = fields["max_tokens"] != 0
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(pairs)))
    for choice, (output, sequence) in zip(whole["choices"], pairs, strict=True):
        text = sequence.text if shown else ""
        ids = sequence.token_ids if shown else []
        if fields.get("echo"):
            skip = fields["skip_special_tokens"]
            text = (output.prompt or tokenizer.decode(output.prompt_token_ids, skip)) + text
        assert (choice["message"]["content"] if kind == "chat" else choice["text"]) == text
        if kind == "chat":
            told = {choice["message"].get(name) for name in ("reasoning", "reasoning_content")}
            shown_reasoning = fields["include_reasoning"] is not False and sequence.reasoning
            assert told == {shown_reasoning or None}
        assert choice["finish_reason"] == (sequence.finish_reason if shown else "length")
        assert choice["stop_reason"] == (sequence.stop_reason if shown else None)
        assert choice.get("token_ids") == (ids if fields["return_token_ids"] else None)
        about = whole if kind == "chat" else choice
        found = about.get("prompt_logprobs")
        if fields["prompt_logprobs"] is None:
            assert found is None
        else:
            assert [entry and len(entry) for entry in found] == [None] + [
                1 + fields["prompt_logprobs"]
            ] * (len(output.prompt_token_ids) - 1)
        entries = choice["logprobs"]
        if fields.get("logprobs") is None:
            assert entries is None
        elif kind == "completion":
            echoed = output.prompt_token_ids if fields["echo"] else []
            tokens = entries["tokens"] if entries else []
            assert len(tokens) == len(echoed) + len(ids)
            assert entries is None or {len(column) for column in entries.values()} == {len(tokens)}
        else:
            assert [bytes(entry["bytes"]) for entry in entries["content"]] == [
                tokenizer.token_bytes(token) for token in ids
            ]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(sequence.token_ids) for _, sequence in pairs) if shown else 0
    cached = {"cached_tokens": 2 * len(outputs)}
    reasoned = sum(sequence.num_reasoning_tokens for _, sequence in pairs)
    of_answer = {"reasoning_tokens": reasoned}
    assert whole["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": cached,
        **({"completion_tokens_details": of_answer} if kind == "chat" else {}),
    }  # fmt: skip


SCHEMAS = openapi(LIMITS)["components"]


def conforms(kind: str, value: Any) -> None:
    jsonschema_rs.validate({"$ref": f"#/components/schemas/{kind}", "components": SCHEMAS}, value)


def check_with_openai(kind: str, chunks: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """Strictly: as its own client, which validates nothing, does not."""
    if kind == "chat":
        conforms("ChatCompletion", whole)
        ChatCompletion.model_validate(whole)
        for chunk in chunks:
            conforms("ChatChunk", chunk)
            ChatCompletionChunk.model_validate(chunk)
        return
    for chunk in (*chunks, whole):
        conforms("Completion", chunk)
        plain = json.loads(json.dumps(chunk))
        for choice in plain["choices"]:
            # OpenAI's server sends them, its types do not know: the end of what is not over, and
            # the logprob of a first token
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for name in ("token_logprobs", "top_logprobs"):
                entries = (choice["logprobs"] or {}).get(name)
                if entries and entries[0] is None:
                    del entries[0]
        Completion.model_validate(plain)


def simple(tokenizer: Tokenizer, kind: str = "completion", **fields: Any) -> Talk:
    asked = (
        {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    )
    return Talk(tokenizer, kind, asked | fields)


def test_chunks_differ_in_their_text_alone(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer)
    chunks = [
        chunk for text in "ab" for chunk in talk.update(talk.output(0, 0, tokenizer.encode(text)))
    ]
    a, b = chunks
    assert a == b.replace(b'"b"', b'"a"')
    assert json.loads(a[6:]) == {
        "id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": "tiny",
        "system_fingerprint": "trueline-test",
        "choices": [
            {"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}
        ],
    }  # fmt: skip


def test_no_news_no_frames(tokenizer: Tokenizer) -> None:
    for fields in ({}, {"logprobs": 1}, {"return_token_ids": True}):
        talk = simple(tokenizer, n=2, stop="bc", **fields)
        assert list(talk.writer.delta(talk.outputs())) == []
        assert len(talk.update(talk.output(0, 1, tokenizer.encode("a")))) == 1
        assert list(talk.writer.delta(talk.outputs())) == []
        assert len(talk.update(talk.output(0, 1, tokenizer.encode("b")))) == (1 if fields else 0)
        assert len(talk.update(talk.output(0, 1, [], finish_reason="length"))) == 1
        assert list(talk.writer.delta(talk.outputs())) == []


def test_stop_string_ends_a_stream(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer, "chat", stop=["stop"])
    chunks = [f for c in "a st" for f in talk.update(talk.output(0, 0, tokenizer.encode(c)))]
    chunks += talk.update(talk.output(0, 0, tokenizer.encode("op!")))
    chunks = [payload(chunk)["choices"][0] for chunk in chunks]
    assert [chunk["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": " "}, {},
    ]  # fmt: skip
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", "stop")


def test_what_a_stream_says_of_the_prompt_waits_for_it(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer, "chat", n=2, prompt_logprobs=1, return_token_ids=True)
    assert talk.update(talk.output(0, 1, [5])) == []
    assert talk.update(talk.scored(0, 1)) == []
    chunks = [payload(chunk) for chunk in talk.update(talk.scored(0, 0))]
    assert chunks[0]["choices"][0]["index"] == 1
    assert chunks[0]["prompt_token_ids"] == talk.states[0].output.prompt_token_ids
    (entry,) = (
        chunks[0]["prompt_logprobs"][2][key]
        for key in [str(talk.states[0].output.prompt_token_ids[2])]
    )
    assert set(entry) == {"logprob", "rank", "decoded_token"}
    assert "prompt_logprobs" not in chunks[1]
    later = [payload(chunk) for chunk in talk.update(talk.output(0, 0, [6]))]
    assert not any("prompt_logprobs" in chunk for chunk in later)


def test_scoring(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer, prompt="h€y", max_tokens=0, echo=True, logprobs=1)
    talk.update(talk.scored(0, 0))
    talk.update(talk.output(0, 0, [257], finish_reason="stop", stop_reason=257))
    whole = json.loads(talk.again.whole(talk.outputs()))
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("h€y", "length")
    assert whole["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert found["tokens"] == ["h", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "y"]
    assert found["text_offset"] == [0, 1, 1, 1, 2]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    h = talk.states[0].output.prompt_token_ids[4]
    assert found["token_logprobs"][4] == -7.25 - h / 64
    assert found["top_logprobs"][4] == {"y": -7.25 - h / 64, tokenizer.token_text(h + 1): -0.5}


def test_offsets_of_special_tokens(tokenizer: Tokenizer) -> None:
    """In the text where it spells them, nowhere where the tokenizer put them."""
    talk = simple(tokenizer, prompt="a<|user|>b", echo=True, logprobs=0)
    talk.states[0].output.prompt_token_ids.insert(0, 256)
    talk.update(talk.scored(0, 0))
    talk.update(talk.output(0, 0, tokenizer.encode("cd"), finish_reason="length"))
    (choice,) = json.loads(talk.again.whole(talk.outputs()))["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert tokens == ["<|begin|>", "a", "<|user|>", "b", "c", "d"]
    assert offsets == [0, 0, 1, 9, 10, 11]
    for token, offset in list(zip(tokens, offsets, strict=True))[1:]:
        assert choice["text"].startswith(token, offset)


def test_offsets_after_half_a_character(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("a€")[:2]
    talk = simple(tokenizer, prompt=half, echo=True, logprobs=0)
    talk.update(talk.scored(0, 0))
    talk.update(talk.output(0, 0, tokenizer.encode("b"), finish_reason="length"))
    (choice,) = json.loads(talk.again.whole(talk.outputs()))["choices"]
    assert choice["text"] == "a\ufffdb"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer, "chat", logprobs=True, top_logprobs=2)
    ids = tokenizer.encode("é")
    talk.update(talk.output(0, 0, ids, finish_reason="length"))
    (choice,) = json.loads(talk.again.whole(talk.outputs()))["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("\\xc3", [0xC3])
    assert first["logprob"] == -7.25 - ids[0] / 64
    assert first["rank"] == 3, "it is not among the two"
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -1.5]
    assert bytes(first["top_logprobs"][0]["bytes"]) == tokenizer.token_bytes(ids[0] + 1)


def test_tokens_as_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    for kind, fields in (
        ("chat", {"logprobs": True, "top_logprobs": 2}),
        ("completion", {"logprobs": 2}),
    ):
        talk = simple(tokenizer, kind, return_tokens_as_token_ids=True, **fields)
        talk.update(talk.output(0, 0, ids, finish_reason="length"))
        (choice,) = json.loads(talk.again.whole(talk.outputs()))["choices"]
        names = [f"token_id:{token}" for token in ids]
        if kind == "chat":
            content = choice["logprobs"]["content"]
            assert [each["token"] for each in content] == names
            assert b"".join(bytes(each["bytes"]) for each in content) == "é".encode()
            assert content[0]["top_logprobs"][0]["token"] == f"token_id:{ids[0] + 1}"
        else:
            assert choice["logprobs"]["tokens"] == names
            assert set(choice["logprobs"]["top_logprobs"][0]) >= {
                names[0],
                f"token_id:{ids[0] + 1}",
            }
        assert (
            choice["text"] == "é" if kind == "completion" else choice["message"]["content"] == "é"
        )


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_json_has_finite_numbers(tokenizer: Tokenizer, value: float) -> None:
    for kind, fields in (("chat", {"logprobs": True}), ("completion", {"logprobs": 0})):
        talk = simple(tokenizer, kind, prompt_logprobs=0, **fields)
        prompt, _, output = talk.scored(0, 0)
        output.prompt_scores = [TokenScore(s.token_id, value, 9) for s in output.prompt_scores]
        talk.update((prompt, 0, output))
        output = talk.output(0, 0, [5], finish_reason="length")[2]
        output.scores = [TokenScore(5, value, 1)]
        talk.update((0, 0, output))
        text = talk.again.whole(talk.outputs()).decode()
        assert text.count("-9999.0") >= 2
        assert '"logprob":null' not in text


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize(
    ("reason", "status", "code"), [("abort", 503, "aborted"), ("error", 500, "engine_error")]
)
def test_failures(tokenizer: Tokenizer, kind: str, reason: str, status: int, code: str) -> None:
    talk = simple(tokenizer, kind, n=2)
    talk.update(talk.output(0, 0, tokenizer.encode("a")))
    output = talk.output(0, 0, tokenizer.encode("b"), finish_reason=reason, error="it broke")
    *chunks, last = [payload(chunk) for chunk in talk.update(output)]
    assert last["error"]["message"] == "it broke"
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", code)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert talk.update(talk.output(0, 0, [])) == []
    with pytest.raises(ApiError) as caught:
        talk.again.whole(talk.outputs())
    assert (caught.value.status, caught.value.message) == (status, "it broke")


def test_a_failed_prompt_is_told_though_it_was_not_scored(tokenizer: Tokenizer) -> None:
    talk = simple(tokenizer, prompt_logprobs=1)
    output = talk.output(0, 0, [], finish_reason="error", error="it broke")
    assert payload(talk.update(output)[-1])["error"]["message"] == "it broke"


def test_names_with_anything_in_them(tokenizer: Tokenizer) -> None:
    limits = msgspec.structs.replace(LIMITS, models=('a"\0\\u0000"',))
    request = read_completion(b'{"prompt": "a"}', limits)
    writer = CompletionWriter('x"\0', 1, "\0", request, tokenizer)
    sequence = CompletionOutput(0, "\0", [1])
    output = RequestOutput("0", "a", [1], None, [sequence])
    first = [payload(chunk) for chunk in writer.delta([output])]
    sequence.text += '"\0'
    sequence.token_ids.append(2)
    second = [payload(chunk) for chunk in writer.delta([output])]
    assert [chunk["choices"][0]["text"] for chunk in first + second] == ["\0", '"\0']
    assert (second[0]["id"], second[0]["model"]) == ('x"\0', limits.models[0])


def test_models() -> None:
    card = ModelCard(id="tiny", created=5, max_model_len=64)
    found = json.loads(msgspec.json.encode(ModelList(data=[card])))
    conforms("ModelList", found)
    assert Model.model_validate(found["data"][0]).id == "tiny"


def test_a_text_costs_little_to_send(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    """The running chunks of a plain stream build no structs."""
    talk = simple(tokenizer, "chat")
    talk.update(talk.output(0, 0, tokenizer.encode("a")))

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a struct was built")

    chunk: Callable[..., Any] = never
    monkeypatch.setattr(ChatWriter, "_chunk", chunk)
    (event,) = talk.update(talk.output(0, 0, tokenizer.encode("b")))
    assert payload(event)["choices"][0]["delta"] == {"content": "b"}
