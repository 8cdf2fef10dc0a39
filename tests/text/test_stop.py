"""Stop strings against a search of the whole text, for every way of cutting it."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueline.errors import UsageError
from trueline.text.stop import StopChecker


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end at which a stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    checker = StopChecker(stops, include)
    seen = ""
    for piece in pieces:
        text, matched = checker.push(piece)
        seen += text
        assert matched == checker.matched
    return seen + checker.flush(), checker.matched


SHORT = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@given(text=SHORT, stops=STOPS, cuts=st.sets(st.integers(0, 14)), include=st.booleans())
def test_any_cut_gives_the_search_of_the_whole(
    text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops, include) == naive(text, stops, include)


def test_every_text_and_every_cut() -> None:
    """All texts of seven letters, whole and letter by letter, with stops that overlap."""
    stops = ["aab", "ba", "abab", "bbb"]
    for letters in product("ab", repeat=7):
        text = "".join(letters)
        for include in (False, True):
            wanted = naive(text, stops, include)
            assert run([text], stops, include) == wanted
            assert run(list(text), stops, include) == wanted
            assert run([text[:3], "", text[3:]], stops, include) == wanted


@given(text=SHORT, stops=STOPS)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops, False)
    emitted = ""
    for i, char in enumerate(text):
        emitted += checker.push(char).text
        if checker.matched is not None:
            return
        seen = text[: i + 1]
        could_begin = [
            k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])
        ] or [0]
        assert emitted == seen[: len(seen) - max(could_begin)]


def test_examples() -> None:
    checker = StopChecker(["\n\nUser:", "</s>"], False)
    assert checker.push("Hello <") == ("Hello ", None)
    assert checker.push("b> there\n") == ("<b> there", None)
    assert checker.push("\nUs") == ("", None)
    assert checker.push("er: and more") == ("", "\n\nUser:")
    assert checker.push("never seen") == ("", "\n\nUser:")
    assert checker.flush() == ""
    assert StopChecker([], True).push("anything") == ("anything", None)
    # complete first, although the other one began earlier
    assert StopChecker(["abcd", "bc"], False).push("xabcd") == ("xa", "bc")
    assert StopChecker(["bc", "abc"], True).push("xabcd") == ("xabc", "abc")
    assert StopChecker(["界"], False).push("世界") == ("世", "界")


def test_text_is_let_go_at_the_end() -> None:
    checker = StopChecker(["stop"], False)
    assert checker.push("don't st") == ("don't ", None)
    assert checker.flush() == "st"


@pytest.mark.parametrize("stops", [[""], "stop", [1], ["a", None]])
def test_refuses(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="stop = "):
        StopChecker(stops, False)
