"""Readers of items, and the prompts that are made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.evaluate import tasks
from trueline.evaluate.items import Item
from trueline.evaluate.prompts import PromptFormat
from trueline.evaluate.tasks import JsonlKeys
from trueline.tasks.stories import CATEGORIES, split_of

Write = Callable[..., Path]
SOLUTION = "She sells 16 - 3 = <<16-3=13>>13 eggs.\nThat is $<<13*2=26>>26.\n#### 26"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*given: Any) -> Path:
        file = tmp_path / "items.jsonl"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in given]
        file.write_text("\n".join(texts))
        return file

    return lines


def test_gsm8k(write: Write) -> None:
    first, second = (
        {"question": "How much?", "answer": SOLUTION},
        {"question": "q", "answer": "####1,000"},
    )
    task = tasks.gsm8k(write(first, "", second, ""))
    assert [item.answer for item in task.items] == ["26", "1,000"]
    assert task.items[0].solution == "She sells 16 - 3 = 13 eggs.\nThat is $26.\n#### 26"
    assert list(task.matches) == ["strict", "flexible"]
    assert task.items[0].id == tasks.gsm8k(write(second, first)).items[1].id
    assert len(task.items[0].id) == 16


def test_aime(write: Write) -> None:
    lines = [{"problem": "p1", "answer": "073"}, {"question": "p2", "answer": 12, "id": 7},
             {"problem": "p3", "answer": "0"}]  # fmt: skip
    task = tasks.aime(write(*lines))
    assert [item.answer for item in task.items] == ["73", "12", "0"]
    assert task.items[1].id == "7"


def test_jsonl(write: Write) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [{"q": "one", "a": 1.5, "c": "x"}, {"q": chat, "a": "two", "c": 2}]
    keys = JsonlKeys(prompt="q", answer="a", category="c", matches=("exact", "contains"))
    task = tasks.jsonl(write(*lines), keys)
    assert [(i.question, i.answer, i.category) for i in task.items] == [
        ("one", "1.5", "x"), (chat, "two", "2")]  # fmt: skip
    assert tasks.select(task.items, ["2"]) == task.items[1:]
    assert tasks.select(task.items, ["all"], 1) == task.items[:1]


def test_a_text_may_hold_any_line_separator(write: Write) -> None:
    line = '{"prompt": "a\u2028b\u0085c", "answer": "x"}'
    assert tasks.jsonl(write(line), JsonlKeys()).items[0].question == "a\u2028b\u0085c"


GSM8K, AIME = tasks.gsm8k, tasks.aime


def jsonl(file: Path, **keys: Any) -> Any:
    return tasks.jsonl(file, JsonlKeys(**keys))


def numbers(file: Path) -> Any:
    return jsonl(file, matches=("number",))


def patterns(file: Path) -> Any:
    return jsonl(file, matches=("regex",))


GOOD = {"question": "q", "problem": "p", "prompt": "p", "answer": "#### 1"}
BAD: list[tuple[Any, Any, str]] = [
    (GSM8K, "{", "line 2: not JSON"),
    (GSM8K, "[1]", "line 2: found [1]; accepted: a JSON object"),
    (GSM8K, '"text"', "accepted: a JSON object"),
    (GSM8K, {"answer": "#### 1"}, "line 2: no key 'question'; it has: answer"),
    (GSM8K, {"question": "q"}, "line 2: no key 'answer'; it has: question"),
    (GSM8K, {"question": "q", "anwser": "#### 1"}, "the nearest known name is 'anwser'"),
    (GSM8K, {"question": 1, "answer": "#### 1"}, "key 'question': found 1; accepted: a text"),
    (GSM8K, {"question": " ", "answer": "#### 1"}, "key 'question': found ' '"),
    (GSM8K, {"question": "q", "answer": None}, "key 'answer': found None"),
    (GSM8K, {"question": "q", "answer": "26"}, "ends with #### and a number"),
    (GSM8K, {"question": "q", "answer": "#### many"}, "ends with #### and a number"),
    (GSM8K, GOOD | {"id": []}, "key 'id': found []"),
    (AIME, {"answer": 3}, "no key 'problem' or 'question'"),
    (AIME, {"problem": "p"}, "no key 'answer'"),
    (AIME, {"problem": "p", "answer": "7.5"}, "accepted: an integer of up to 18 digits, as 73"),
    (AIME, {"problem": "p", "answer": 7.0}, "accepted: an integer"),
    (AIME, {"problem": "p", "answer": True}, "accepted: an integer"),
    (AIME, {"problem": "p", "answer": "x"}, "accepted: an integer"),
    (AIME, {"problem": "p", "answer": None}, "accepted: an integer"),
    (AIME, {"problem": "p", "answer": "9" * 5000}, "accepted: an integer of up to 18 digits"),
    (jsonl, {"answer": "a"}, "no key 'prompt'"),
    (jsonl, {"prompt": "p"}, "no key 'answer'"),
    (jsonl, {"prompt": "", "answer": "a"}, "key 'prompt': found ''"),
    (jsonl, {"prompt": 3, "answer": "a"}, "key 'prompt': found 3"),
    (jsonl, {"prompt": [], "answer": "a"}, "at least one message"),
    (jsonl, {"prompt": ["hi"], "answer": "a"}, "messages as {'role'"),
    (jsonl, {"prompt": [{"role": "user"}], "answer": "a"}, "messages as {'role'"),
    (jsonl, {"prompt": [{"role": 1, "content": "x"}], "answer": "a"}, "messages as {'role'"),
    (jsonl, {"prompt": "p", "answer": ["a"]}, "key 'answer': found ['a']"),
    (jsonl, {"prompt": "p", "answer": True}, "key 'answer': found True"),
    (jsonl, {"prompt": "p", "answer": ""}, "key 'answer': found ''"),
    (jsonl, {"prompt": "p", "answer": " \n"}, "accepted: a text that is not empty"),
    (jsonl, '{"prompt": "p", "answer": NaN}', "not JSON"),
    (jsonl, "[" * 100_000, "not JSON"),
    (jsonl, '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON (maximum recursion depth"),
    (numbers, {"prompt": "p", "answer": "a"}, "accepted: a number, for --match number"),
    (patterns, {"prompt": "p", "answer": "("}, "a regular expression"),
]


@pytest.mark.parametrize(("read", "line", "said"), BAD)
def test_a_bad_line_is_named(read: Any, line: Any, said: str, write: Write) -> None:
    good = GOOD | ({"answer": 1} if read in (AIME, numbers, patterns) else {})
    file = write(good, line)
    with pytest.raises(UsageError) as caught:
        read(file)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{file}, line 2: ")


def test_numbers_as_answers(write: Write) -> None:
    lines = [f'{{"prompt": "p", "answer": {number}}}' for number in ("1e3", "1e-7", "1e20", "8")]
    found = [item.answer for item in numbers(write(*lines)).items]
    assert found == ["1000.0", "0.0000001", "100000000000000000000", "8"]


def test_files_that_are_none(tmp_path: Path, write: Write) -> None:
    with pytest.raises(UsageError, match="not readable"):
        tasks.gsm8k(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="no items"):
        tasks.gsm8k(write("", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9", "answer": "#### 1"}\n')
    with pytest.raises(UsageError, match="line 1: not JSON"):
        tasks.gsm8k(tmp_path / "latin.jsonl")


def test_ids_are_stable_and_differ(write: Write) -> None:
    same = {"prompt": "p", "answer": "a"}
    items = tasks.jsonl(write(same, same, {"prompt": "q", "answer": "a"}), JsonlKeys()).items
    assert items[1].id == f"{items[0].id}-2"
    assert len({item.id for item in items}) == 3
    with pytest.raises(UsageError, match=r"line 2: key 'id': .* line 1 has the same"):
        tasks.jsonl(write(same | {"id": 1}, same | {"id": "1"}), JsonlKeys())


def test_categories_and_limits_are_checked(write: Write) -> None:
    keys = JsonlKeys(category="c")
    items = tasks.jsonl(write({"prompt": "p", "answer": "a", "c": "short"}), keys).items
    with pytest.raises(
        UsageError, match="accepted: 'all', 'short'; the nearest known name is 'short'"
    ):
        tasks.select(items, ["shorts"])
    with pytest.raises(UsageError, match="--limit 0"):
        tasks.select(items, [], 0)


def test_stories() -> None:
    task = tasks.stories(limit=10)
    counts = Counter(item.category for item in task.items)
    assert list(counts.items()) == [(f"{n} operations", 3 if n < 4 else 2) for n in range(2, 6)]
    assert len({item.id for item in task.items}) == 10
    for item in task.items:
        assert task.matches["answer"](item.solution, item.answer) == (item.answer, True)
        assert task.matches["answer"]("#### -1", item.answer) == ("-1", False)
        assert split_of(str(item.question)) == "test"
    fewer = tasks.stories(limit=4).items
    assert {item.id for item in fewer} < {item.id for item in task.items}
    assert [item.category for item in tasks.stories(["long", "recall", "long"], 3).items] == [
        "long", "long", "recall"]  # fmt: skip
    assert {item.category for item in tasks.stories(["all"], 9).items} == set(CATEGORIES)
    with pytest.raises(UsageError, match="the nearest known name is '2 operations'"):
        tasks.stories(["2 operation"])
    with pytest.raises(UsageError, match="--limit 0"):
        tasks.stories(limit=0)


# -- prompts -------------------------------------------------------------------------------

ITEM = Item(id="1", question="How many?", answer="3")
EXAMPLES = (Item(id="2", question="Q1", answer="1", solution="So.\n#### 1"),
            Item(id="3", question="Q2", answer="2", solution="#### 2"))  # fmt: skip


def test_a_completion() -> None:
    form = PromptFormat(chat=False, is_question_and_answer=True)
    assert form.prompt(ITEM) == "Question: How many?\nAnswer:"
    told = replace(form, instruction="Briefly.")
    assert told.prompt(ITEM) == "Question: How many?\n\nBriefly.\nAnswer:"
    shots = replace(told, examples=EXAMPLES)
    assert shots.prompt(ITEM) == (
        "Question: Q1\nAnswer: So.\n#### 1\n\nQuestion: Q2\nAnswer: #### 2\n\n"
        "Question: How many?\nAnswer:"
    )
    assert PromptFormat(chat=False).prompt(ITEM) == "How many?"


def test_a_chat() -> None:
    form = PromptFormat(chat=True, instruction="Briefly.", system="Be kind.")
    assert form.prompt(ITEM) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "How many?\n\nBriefly."},
    ]
    shots = PromptFormat(chat=True, instruction="not said", examples=EXAMPLES).prompt(ITEM)
    assert [message["role"] for message in shots] == ["user", "assistant"] * 2 + ["user"]
    assert shots[-1] == {"role": "user", "content": "How many?"}
    own = [{"role": "user", "content": "u"}]
    messages = Item(id="4", question=own, answer="a")
    assert PromptFormat(chat=True, system="Be kind.").prompt(messages)[1:] == own
    with pytest.raises(UsageError, match=r"--instruction: item 4 .* sent as they are"):
        form.prompt(messages)
    with pytest.raises(UsageError, match="is a list of chat messages"):
        PromptFormat(chat=False).prompt(Item(id="4", question=own, answer="a"))


def test_few_shot_examples(write: Write) -> None:
    file = write(*({"question": f"q{i}", "answer": SOLUTION} for i in range(3)))
    shown = tasks.few_shot_examples(file, 2)
    assert [item.question for item in shown] == ["q0", "q1"]
    assert "<<" not in shown[0].solution
    with pytest.raises(UsageError, match=r"--num-fewshot 4: .* has 3 items"):
        tasks.few_shot_examples(file, 4)
