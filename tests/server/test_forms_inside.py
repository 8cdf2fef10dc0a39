"""Answers in a form through HTTP: what every client's field asks for holds in `content`, behind
whatever reasoning there is, and a stream says what the whole says."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from grammars import matcher
from inside import Inside
from offered_tools import USER, calling_tokenizer
from trueline.grammar.compiled import choice_grammar, json_grammar, lark_grammar, regex_grammar

Tiny = Callable[..., Path]
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 1]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NAMED = {"name": "record", "schema": RECORD, "strict": True}
LARK = 'start: "(" start ")" | /[a-c]+[0-9]/'
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}},
                    json_grammar(RECORD)),
    "json_object": ({"response_format": {"type": "json_object"}}, json_grammar({"type": "object"})),
    "regex": ({"structured_outputs": {"regex": "[a-f]{2,9}"}}, regex_grammar("[a-f]{2,9}")),
    "choice": ({"guided_choice": ["yes", "no"]}, choice_grammar(["yes", "no"])),
    "grammar": ({"structured_outputs": {"grammar": LARK}}, lark_grammar(LARK)),
}  # fmt: skip
THINKS = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "stop": {"stop": ["b", "1", "o"]},
    "thinks": THINKS,
    "thinks, n and logprobs": THINKS | {"n": 2, "logprobs": True},
    "thinks, stop": THINKS | {"stop": ["e", "1"]},
    "thinks, unseen": THINKS | {"include_reasoning": False},
    "thinks at once": THINKS | {"thinking_token_budget": 0},
    "cut": {"max_tokens": 3},
    "min_tokens": {"min_tokens": 6},
    "ignore_eos": {"ignore_eos": True},
    "bad_words": {"bad_words": ["y", "9"]},
    "ids": {"return_token_ids": True},
}


@pytest.fixture(scope="module")
def inside(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Inside:
    directory = tmp_path_factory.mktemp("forms") / "model"
    shutil.copytree(tiny("deepseek_v3", keys={"vocab_size": 300}), directory)
    calling_tokenizer(directory, "glm47")
    return Inside(directory, tool_call_parser="glm47", max_model_len=512, max_num_seqs=4)


def ask(inside: Inside, form: str, option: str, **fields: Any) -> Any:
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = {"messages": [USER], "max_tokens": 40, "seed": 3, "stream": False}
    body = asked | switch | FORMS[form][0] | OPTIONS[option] | fields
    heard = inside.ask("/v1/chat/completions", body)
    assert heard.status == 200, heard.body
    if not body["stream"]:
        return json.loads(heard.body)
    return [json.loads(each[6:]) for each in heard.body.split(b"\n\n") if b"{" in each]


Said = tuple[str, str, Any, Any, Any]
"""content, reasoning, logprobs, why it ended, token ids"""


def whole(found: Any) -> list[Said]:
    return [
        (
            each["message"]["content"] or "",
            each["message"].get("reasoning_content") or "",
            (each["logprobs"] or {}).get("content") or [],
            each["finish_reason"],
            each.get("token_ids") or [],
        )
        for each in found["choices"]
    ]


def streamed(chunks: Any) -> list[Said]:
    texts: dict[int, list[Any]] = defaultdict(lambda: ["", "", [], None, []])
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for each in chunk["choices"]:
            told, delta = texts[each["index"]], each["delta"]
            told[0] += delta.get("content") or ""
            told[1] += delta.get("reasoning_content") or ""
            told[2] += (each.get("logprobs") or {}).get("content") or []
            told[3] = each["finish_reason"] or told[3]
            told[4] += each.get("token_ids") or []
    return [tuple(texts[index]) for index in sorted(texts)]


def check(form: str, option: str, said: Said) -> bool:
    """Whether the form was completed."""
    content, reasoning, logprobs, reason, _ = said
    begun, text = matcher(FORMS[form][1]), list(content.encode())
    if "�" not in content:  # what was cut within a character
        assert begun.try_consume_tokens(text) == len(text), (form, option, content)
    asked = OPTIONS[option]
    assert bool(logprobs) == bool(asked.get("logprobs"))
    unseen = asked.get("include_reasoning") is False or not asked.get("thinking_token_budget")
    assert not (unseen and reasoning)
    assert "think>" not in content
    if reason == "length" or "stop" in asked:
        return False
    assert reason == "stop"
    assert begun.is_accepting(), (form, option, content)
    return True


def compare(inside: Inside, pairs: Iterator[tuple[str, str]]) -> None:
    ended = []
    for form, option in pairs:
        found = ask(inside, form, option)
        said = whole(found)
        assert streamed(ask(inside, form, option, stream=True)) == said, (form, option)
        assert len(said) == OPTIONS[option].get("n", 1)
        budget = OPTIONS[option].get("thinking_token_budget", 0) * len(said)
        assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget
        ended += [check(form, option, each) for each in said]
    assert sum(ended) > len(ended) / 3


def test_each_option_beside_a_form(inside: Inside) -> None:
    compare(inside, zip(cycle(FORMS), OPTIONS, strict=False))


@pytest.mark.slow
def test_each_option_beside_each_form(inside: Inside) -> None:
    compare(inside, product(FORMS, OPTIONS))


def test_reasoning_and_form_share_the_tokens(inside: Inside) -> None:
    """A budget beyond max_tokens leaves the form nothing."""
    for form in FORMS:
        found = ask(inside, form, "thinks", max_tokens=5, min_tokens=5, thinking_token_budget=50)
        (said,) = whole(found)
        assert said[3] == "length", form
        assert said[0] == "" or len(said[1]) < 5


@pytest.mark.parametrize("form", ["regex", "json_object"])
def test_a_prompt_that_is_echoed(inside: Inside, form: str) -> None:
    """And scored: the form is of what follows."""
    fields = {"prompt": "b" * 9, "echo": True, "logprobs": 1, "max_tokens": 30, "seed": 1}
    heard = inside.ask("/v1/completions", fields | FORMS[form][0])
    (choice,) = json.loads(heard.body)["choices"]
    assert choice["text"].startswith("b" * 9)
    text = choice["text"][9:]
    begun = matcher(FORMS[form][1])
    assert begun.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert "".join(choice["logprobs"]["tokens"]).startswith("b" * 9)
