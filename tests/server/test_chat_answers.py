"""Answers of chats as a client gets them: reasoning, and what is said."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tokenizers import END, TEMPLATE, VOCAB, chat_tokenizer
from trueline.engine.messages import CoreOutput, TokenScore
from trueline.grammar.constraint import Constraint, Reasoning
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.outputs import CompletionOutput
from trueline.server.answers import ChatAnswers
from trueline.server.protocol import ApiError, ChatWriter, RequestLimits, chat_prompt, read_chat
from trueline.text.answers import AnswerFormat
from trueline.text.tokenizer import Tokenizer

LIMITS = RequestLimits(models=("tiny",), max_model_len=4096, vocab_size=VOCAB)
USER = {"role": "user", "content": "hi"}
OPEN, CLOSE = 262, 263
WITHOUT_SWITCH = TEMPLATE[: TEMPLATE.index("{{ '<think>' if enable")] + "{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("thinker"), ["<think>", "</think>"])


@pytest.fixture(scope="module")
def unswitched(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whose template leaves thinking to the model."""
    directory = tmp_path_factory.mktemp("unswitched")
    return chat_tokenizer(directory, ["<think>", "</think>"], template=WITHOUT_SWITCH)


def output(ids: list[int], end: str | None) -> CoreOutput:
    scores = [TokenScore(token, -1.0, 1) for token in ids]
    return CoreOutput(request_id="a", token_ids=ids, scores=scores, finish_reason=end)


class Chat:
    def __init__(self, tokenizer: Tokenizer, **fields: Any) -> None:
        body = json.dumps({"messages": [USER], "max_tokens": 1000} | fields).encode()
        self.asked = read_chat(body, LIMITS)
        self.tokenizer = tokenizer
        self.prompt, self.ids = chat_prompt(self.asked, tokenizer, LIMITS)
        self.answers = ChatAnswers.of(AnswerFormat(tokenizer), self.asked, self.ids)

    def answer(self, *pieces: list[int], end: str = "stop") -> CompletionOutput:
        """What is read of these tokens, and that a client gets it, streamed and whole."""
        prepared = PreparedParams(self.asked.params, self.tokenizer)
        state = RequestOutputState("a", None, self.ids, prepared, self.answers.reader)
        writers = [ChatWriter("c", 0, "f", self.asked, self.tokenizer) for _ in range(2)]
        streamed: dict[str, str] = {}
        for i, ids in enumerate(pieces):
            last = i == len(pieces) - 1
            ids = [*ids, END] if last and end == "stop" else ids
            state.update(output(ids, end if last else None))
            for chunk in writers[0].delta([state.output]):
                for name, text in json.loads(chunk[6:])["choices"][0]["delta"].items():
                    streamed[name] = streamed.get(name, "") + text
        whole = json.loads(writers[1].whole([state.output]))
        assert whole["choices"][0]["message"] == {**streamed, "refusal": None}
        (found,) = state.output.outputs
        details = whole["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": found.num_reasoning_tokens}
        return found

    def told(self, text: str, **more: Any) -> CompletionOutput:
        return self.answer(self.tokenizer.encode(text, add_special_tokens=False), **more)


def refused(tokenizer: Tokenizer, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        Chat(tokenizer, **fields)
    assert caught.value.status == 400
    return caught.value


def test_reasoning_is_apart(tokenizer: Tokenizer) -> None:
    found = Chat(tokenizer).told("so 日</think>\n\nHello.")
    assert (found.reasoning, found.text) == ("so 日", "Hello.")
    assert found.num_reasoning_tokens == len("so 日".encode())  # without the marker
    cut = Chat(tokenizer).told("so", end="length")
    assert (cut.reasoning, cut.text, cut.num_reasoning_tokens) == ("so", "", 2)
    again = Chat(tokenizer, chat_template_kwargs={"enable_thinking": False})
    found = again.told("Hello <think>so</think> you")
    assert (found.text, found.reasoning, found.num_reasoning_tokens) == ("Hello you", "so", 2)
    half = Chat(tokenizer).answer(tokenizer.encode("日")[:1], [CLOSE], tokenizer.encode("a"))
    assert (half.reasoning, half.text) == ("\ufffd", "a")


def test_reasoning_may_be_left_out(tokenizer: Tokenizer) -> None:
    chat = Chat(tokenizer, include_reasoning=False)
    prepared = PreparedParams(chat.asked.params, tokenizer)
    state = RequestOutputState("a", None, chat.ids, prepared, chat.answers.reader)
    ids = tokenizer.encode("so</think>b", add_special_tokens=False)
    writer, shown = ChatWriter("c", 0, "f", chat.asked, tokenizer), b""
    for place, token in enumerate(ids):
        end = "length" if place == len(ids) - 1 else None
        state.update(output([token], end))
        shown += b"".join(writer.delta([state.output]))
    whole = json.loads(writer.whole([state.output]))
    assert b"reasoning" not in shown
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "b", "refusal": None}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_stop_strings_do_not_fire_in_reasoning(tokenizer: Tokenizer) -> None:
    for include, content in ((False, "a "), (True, "a stop")):
        chat = Chat(tokenizer, stop=["stop"], include_stop_str_in_output=include)
        found = chat.told("stop st</think>op a stop it")
        assert (found.reasoning, found.finish_reason) == ("stop st", "stop")
        assert (found.text, found.stop_reason) == ("op " + content, "stop")


PIECES = ["a", "st", "op", "stop", "<think>", "</think>", "日", "\n", " ", "<", "é"]


@given(
    texts=st.lists(st.sampled_from(PIECES), max_size=12),
    cuts=st.sets(st.integers(1, 40)),
    stop=st.sampled_from([[], ["stop"], ["日", "op"], ["\n"]]),
    thinking=st.booleans(),
    min_tokens=st.sampled_from([0, 5]),
    end=st.sampled_from(["stop", "length"]),
)
def test_any_cut_says_the_same(
    tokenizer: Tokenizer, texts: list[str], cuts: set[int], stop: list[str], thinking: bool,
    min_tokens: int, end: str,
) -> None:  # fmt: skip
    switch = {"enable_thinking": thinking}
    chat = Chat(tokenizer, stop=stop, min_tokens=min_tokens, chat_template_kwargs=switch)
    ids = tokenizer.encode("".join(texts), add_special_tokens=False)
    ends = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    pieces = [ids[a:b] for a, b in pairwise(ends)]
    single = chat.answer(*([token] for token in ids), [], end=end)
    assert chat.answer(*pieces, end=end) == single


def test_where_an_answer_begins(tokenizer: Tokenizer, unswitched: Tokenizer) -> None:
    said = {"role": "assistant", "content": "<think>so"}
    for fields, state in (
        ({}, "open"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "over"),
        ({"chat_template_kwargs": {"thinking": False}}, "over"),
        ({"reasoning_effort": "none"}, "over"),
        ({"add_generation_prompt": False}, "not begun"),
        ({"messages": [{"role": "user", "content": "<think>"}]}, "open"),
        ({"messages": [USER, said], "continue_final_message": True}, "open"),
        ({"messages": [USER, {**said, "content": "so</think>b"}],
          "continue_final_message": True}, "over"),
        ({"messages": [USER, {**said, "content": "<think>so</think>b"}],
          "continue_final_message": True}, "over"),
        ({"messages": [USER, {**said, "content": "b"}], "continue_final_message": True}, "over"),
    ):  # fmt: skip
        assert Chat(tokenizer, **fields).answers.state == state, fields
    chat = Chat(unswitched, messages=[{"role": "user", "content": "<think>"}])
    assert chat.answers.state == "not begun"
    found = chat.told("<think>so</think>b")
    assert (found.reasoning, found.text) == ("so", "b")


def test_a_switch_that_is_not_there_is_refused(tokenizer: Tokenizer, unswitched: Tokenizer) -> None:
    for name in ("thinking", "enable_thinking"):
        error = refused(unswitched, chat_template_kwargs={name: True})
        assert error.param == f"chat_template_kwargs.{name}"
        assert "no switch for thinking" in error.message
        Chat(unswitched, chat_template_kwargs={name: None})
    for effort in ("none", "low"):
        error = refused(unswitched, reasoning_effort=effort)
        assert (error.param, error.message.endswith("accepted: null")) == ("reasoning_effort", True)
    error = refused(tokenizer, reasoning_effort="low")
    assert error.message.endswith("no efforts; accepted: null, or 'none'")
    error = refused(tokenizer, chat_template_kwargs={"reasoning_effort": "low"})
    assert error.param == "chat_template_kwargs.reasoning_effort"
    both = {"thinking": True, "enable_thinking": False}
    assert refused(tokenizer, chat_template_kwargs=both).param == "chat_template_kwargs.thinking"
    error = refused(tokenizer, reasoning_effort="none", chat_template_kwargs={"thinking": True})
    assert error.param == "reasoning_effort"


def test_efforts_of_a_template(tmp_path: Any) -> None:
    template = TEMPLATE + "{{ reasoning_effort }}"
    tokenizer = chat_tokenizer(tmp_path, ["<think>", "</think>"], template=template)
    for fields in (
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
    ):
        prompt = Chat(tokenizer, **fields).prompt
        assert prompt is not None
        assert prompt.endswith("<think>low")
    template = TEMPLATE + "{{ tone }}"
    toned = chat_tokenizer(tmp_path, ["<think>", "</think>"], template=template)
    prompt = Chat(toned, reasoning_effort="none", chat_template_kwargs={"tone": "dry"}).prompt
    assert prompt is not None
    assert prompt.endswith("</think>dry")
    differ = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert refused(tokenizer, **differ).param == "reasoning_effort"


def test_a_grammar_and_a_budget_wait_for_the_end_of_the_reasoning(
    tokenizer: Tokenizer, unswitched: Tokenizer
) -> None:
    grammar = Constraint(grammar="x")
    over: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields, content, wanted in (
        ({}, grammar, Constraint(reasoning=Reasoning(end_ids=(CLOSE,)), grammar="x")),
        ({}, None, None),
        ({"thinking_budget": 7}, None, Constraint(reasoning=Reasoning(end_ids=(CLOSE,), budget=7))),
        (over, grammar, grammar),
        ({**over, "thinking_token_budget": 7}, None, None),
    ):
        assert Chat(tokenizer, **fields).answers.constraint(content) == wanted
    error = refused(unswitched, thinking_budget=7)
    assert error.param == "thinking_token_budget"
    assert refused(tokenizer, thinking_budget=7, thinking_token_budget=8).param == (
        "thinking_token_budget"
    )


def test_parsers_by_name(tokenizer: Tokenizer) -> None:
    assert str(AnswerFormat(tokenizer).found) == (
        "reasoning think (chat template: </think>), calls none (no format's marks in chat template "
        "or vocabulary)"
    )
    off = AnswerFormat(tokenizer, reasoning_parser="none")
    assert off.reasoning is None
    chat = Chat(tokenizer)
    assert ChatAnswers.of(off, chat.asked, chat.ids).reader is None
