"""Which texts have the answer: the tricky ones, one by one."""

from __future__ import annotations

import pytest

from trueline.evaluate.match import (
    MATCHES,
    as_number,
    last_boxed,
    last_number,
    marked_number,
    unusable,
    without_reasoning,
)

NUMBERS = [
    ("18", "18"), ("18.", "18"), ("18.00", "18"), ("$18", "18"), ("$1,234.50", "1234.5"),
    ("-5", "-5"), ("−5", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("12 %", "12"), (" 7 ", "7"),
    (".5", "0.5"), ("1,000,000", "1000000"), ("073", "73"), ("0", "0"), ("-0", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numbers_as_people_write_them(text: str, value: str) -> None:
    assert as_number(text) == as_number(value) == pytest.approx(float(value))


NONE = ["", ".", "-", "$", "1,2", "12,34", "1e3", "x", "5 apples", "1.2.3", "٣"]


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_number(text: str) -> None:
    assert as_number(text) is None


LAST = [
    ("so 10-5 = 5", "5"), ("that is 10-5", "5"), ("x is -5", "-5"), ("(3)-4", "4"),
    ("it costs $18.00.", "18.00"), ("it costs $1,234, all of it", "1,234"), ("of 2,3 and 4,5", "5"),
    ("- 7 apples", "7"), ("balance: -$12", "-$12"), ("−3 °C", "−3"), ("none at all", None),
    ("12345,678", "678"), ("1,2345", "2345"), ("v1.5.", "1.5"), ("a .5 share", ".5"),
    ("18\n\nThe answer is 20!", "20"), ("= 5%", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), LAST)
def test_the_last_number(text: str, found: str | None) -> None:
    assert last_number(text) == found


MARKED = [
    ("so\n#### 18", "18"), ("#### 18.\nQuestion", "18"), ("####18", "18"), ("#### $1,000", "1,000"),
    ("#### -5", "-5"), ("#### $-5", "-5"), ("#### 3\n#### 4", "3"), ("####\n9", "9"),
    ("### 18", None), ("18", None), ("#### eighteen 18", None), ("####", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), MARKED)
def test_the_marked_number(text: str, found: str | None) -> None:
    assert marked_number(text) == found


BOXED = [
    (r"so \boxed{73}.", "73"), (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\text{73}}", "73"),
    (r"\boxed{\boxed{5}}", "5"), (r"$\boxed {\frac{1}{2}}$", r"\frac{1}{2}"),
    (r"\boxed{\mathbf{\text{ 12 }}}", "12"), (r"\boxed{1{,}234}", "1,234"),
    (r"\boxed{7} and \boxed{8", "7"), (r"\boxed{a\}b}", r"a\}b"),
    (r"\boxed{\text{a}\text{b}}", r"\text{a}\text{b}"),
    (r"\boxed 5", None), ("73", None), (r"\boxed{}", ""), (r"\boxed{\$73\,}", "73"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), BOXED)
def test_the_last_box(text: str, found: str | None) -> None:
    got = last_boxed(text)
    assert (got and got.replace("\\ ", "").strip()) == found


def test_a_model_that_repeats_itself_opens_many_boxes() -> None:
    """In one pass: with one for each box this takes minutes."""
    assert last_boxed(r"\boxed{" * 50_000) is None
    assert last_boxed(r"\boxed{7}" + r"\boxed{" * 50_000) == "7"


RIGHT = [
    ("strict", "so 9 * 2\n#### 18", "18", True), ("strict", "it is 18", "18", False),
    ("strict", "#### 18.00", "18", True), ("strict", "#### 1,800", "1800", True),
    ("strict", "#### 17\nno, 18", "18", False),
    ("flexible", "it is 18", "18", True), ("flexible", "18 or 19", "18", False),
    ("flexible", "#### 18\n", "18", True), ("flexible", "none", "18", False),
    ("boxed", r"\boxed{073}", "73", True), ("boxed", r"\boxed{73}", "73", True),
    ("boxed", "73", "73", False), ("boxed", r"\boxed{74} \boxed{73.}", "73", True),
    ("boxed", r"\boxed{x+1}", "x+1", True), ("boxed", r"\boxed{73} \boxed{x}", "73", False),
    ("exact", " Paris\n", "Paris", True), ("exact", "Paris.", "Paris", False),
    ("exact", "paris", "Paris", False), ("number", "about 12 of 20", "20.0", True),
    ("contains", "in Paris, France", "Paris", True), ("contains", "in Lyon", "Paris", False),
    ("regex", "in Paris", r"P\w+s$", True), ("regex", "Paris!", r"P\w+s$", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "answer", "right"), RIGHT)
def test_matches(name: str, text: str, answer: str, right: bool) -> None:
    assert MATCHES[name](text, answer)[1] is right


def test_reasoning_does_not_count() -> None:
    assert without_reasoning("<think>#### 1</think>\n#### 2") == "\n#### 2"
    assert without_reasoning("#### 1</think>#### 2") == "#### 2"
    assert without_reasoning("a</think>b</think>c") == "c"
    assert without_reasoning("<think>it may be 18") == ""
    assert without_reasoning("plain") == "plain"
    assert without_reasoning("it may be 18", "<|assistant|><think>\n") == ""
    assert without_reasoning("17</think>18", "<|assistant|><think>\n") == "18"
    assert without_reasoning("18", "<|assistant|><think>\n\n</think>\n\n") == "18"


def test_answers_that_a_match_cannot_use() -> None:
    assert unusable("number", "Paris") == "a number"
    assert unusable("number", "1,000") is None
    assert "regular expression" in str(unusable("regex", "("))
    assert unusable("exact", "(") is None
