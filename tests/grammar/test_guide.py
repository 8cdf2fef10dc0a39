"""What a guide lets through around its grammars: marks of several tokens, wherever they begin."""

from __future__ import annotations

from grammars import matcher
from trueline.grammar.compiled import regex_grammar
from trueline.grammar.constraint import Constraint, Reasoning, Trigger
from trueline.grammar.guide import ByGrammar, Guide, Only

END = 300


def forced(said: list[int], mark: tuple[int, ...]) -> list[int]:
    """What comes once the budget is spent, to the end of the reasoning."""
    reasoning = Reasoning(end_ids=mark, budget=len(said))
    guide = Guide(Constraint(reasoning=reasoning), {}, [END])
    for token in said:
        assert guide.allowed() is None
        guide.accept(token)
    found: list[int] = []
    while (allowed := guide.allowed()) is not None and len(found) < 10:
        assert isinstance(allowed, Only)
        (token,) = allowed.tokens
        found.append(token)
        guide.accept(token)
    return found


def test_the_end_of_reasoning_is_forced_from_where_it_stands() -> None:
    assert forced([], (1, 2, 3)) == [1, 2, 3]
    assert forced([9, 9], (1, 2, 3)) == [1, 2, 3]
    assert forced([9, 1], (1, 2, 3)) == [2, 3]
    assert forced([9, 1, 2], (1, 2, 3)) == [3]
    assert forced([1, 2, 1], (1, 2, 3)) == [2, 3]
    assert forced([1, 1], (1, 1, 2)) == [2]
    assert forced([1, 2], (1, 1, 2)) == [1, 1, 2]


def test_an_end_token_comes_where_the_form_may_end() -> None:
    """And nowhere where it is to be ignored."""
    grammar = regex_grammar("a+b?")
    for ignore_eos in (False, True):
        matchers = {grammar: matcher(grammar)}
        guide = Guide(Constraint(grammar=grammar), matchers, [END], ignore_eos=ignore_eos)
        for ends in ((), () if ignore_eos else (END,)):
            allowed = guide.allowed()
            assert isinstance(allowed, ByGrammar)
            assert (allowed.allowed_ends, allowed.ends) == (ends, (END,))
            guide.accept(ord("a"))
        guide.accept(ord("b"))
        assert guide.complete


def test_a_call_says_nothing_of_the_next_mark() -> None:
    """Its tokens are the grammar's: what ends it is no beginning of another."""
    grammar = regex_grammar("1")
    token = ord("1")
    made = Constraint(triggers=(Trigger(token_ids=(token, token), grammar=grammar),))
    guide = Guide(made, {grammar: matcher(grammar)}, [END])
    held = []
    for _ in range(6):
        held.append(isinstance(guide.allowed(), ByGrammar))
        guide.accept(token)
    assert held == [False, False, True, False, False, True]
