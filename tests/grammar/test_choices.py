"""Choices and regular expressions: exactly the texts that they say."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grammars import accepts
from trueline.errors import UsageError
from trueline.grammar.compiled import MAX_CHOICES, choice_grammar, regex_grammar

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(choices=st.lists(TEXTS, min_size=1, max_size=5, unique=True), other=TEXTS)
@example(choices=["\x7f"], other="\\u007f")
@example(choices=['"', "\\", "\n", "\0", "/a/"], other="a")
def test_each_choice_and_nothing_else(choices: list[str], other: str) -> None:
    made = choice_grammar(choices)
    for choice in choices:
        assert accepts(made, choice)
        assert accepts(made, choice + "x") == (choice + "x" in choices)
        assert accepts(made, choice[:-1]) == (choice[:-1] in choices)
    assert accepts(made, other) == (other in choices)


@given(text=TEXTS)
@example(text="\x7f")
def test_a_text_as_an_expression(text: str) -> None:
    made = regex_grammar(re.escape(text))
    assert accepts(made, text)
    assert not accepts(made, text + "x")


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        (["a"] * (MAX_CHOICES + 1), f"choice: {MAX_CHOICES + 1} texts; accepted: up to"),
        (["a" * 300_000], "choice: 300000 bytes; accepted: up to"),
        (["\ud800"], "choice: "),
    ],
)
def test_choices_that_cannot_be(choices: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        choice_grammar(choices)
