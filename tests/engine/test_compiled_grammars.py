"""Compiled grammars are kept, so many and no more, those that were asked for last."""

from __future__ import annotations

import pytest

from trueline.engine import grammars
from trueline.engine.grammars import Grammars
from trueline.grammar.compiled import regex_grammar
from trueline.grammar.constraint import Constraint
from trueline.grammar.vocabulary import byte_vocabulary

FORM = Constraint(name="form")


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_KEPT", 3)
    kept = Grammars(byte_vocabulary)
    made = [regex_grammar(letter) for letter in "abcdefgh"]
    for grammar in made:
        kept._matcher(grammar, FORM)
        kept._matcher(made[0], FORM)
        assert len(kept._kept) <= 3
    assert [grammar for grammar, _ in kept._kept] == [made[-2], made[-1], made[0]]
    assert (kept.num_compiled, kept.num_hits) == (len(made), len(made))
    kept.close()
