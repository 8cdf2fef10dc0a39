"""What a request may have of each thing, counted before it costs anything."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import unicodedata
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from paths import DOCS
from trueline.engine.params import SamplingParams
from trueline.ops.sampling import SamplingState, build_rows
from trueline.output_processor import PreparedParams
from trueline.server.offload import OffloadThread
from trueline.server.protocol import ApiError, RequestLimits, read_completion, shape
from trueline.server.protocol.limits import (
    CHOSEN_IDS,
    MAX_CHARS,
    MAX_CHOSEN_IDS,
    MAX_DIGITS,
    MAX_FRACTIONS,
    MAX_ITEMS,
    MAX_NESTED,
    MAX_PROMPT_TOKENS,
    MAX_VALUES,
)
from trueline.server.protocol.raw_json import PIECE, in_pieces
from trueline.text.coverage import NFC_SHRINKS, longest_bytes
from trueline.text.tokenizer import Tokenizer, bad_word_ids
from trueline.tiny.tokenizer import write_tokenizer

LIMITS = RequestLimits(models=("tiny",), max_model_len=64, vocab_size=300)
PAGE = (DOCS / "server.md").read_text()


def refusal(body: bytes, limits: RequestLimits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_completion(body, limits)
    return caught.value


# -- the shape of a body -------------------------------------------------------------------

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(0, 10**9) | st.floats(0, 1e9, allow_nan=False)
    | st.text('a"\\[{,.1e', max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text('b"\\', max_size=3), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def counts(value: Any) -> tuple[int, int]:
    """Lists and objects, floats."""
    if isinstance(value, dict | list):
        parts = [counts(part) for part in (value.values() if isinstance(value, dict) else value)]
        return 1 + sum(p[0] for p in parts), sum(p[1] for p in parts)
    return 0, int(isinstance(value, float))


@given(value=JSON, window=st.integers(1, 40), spaced=st.booleans())
def test_what_is_in_texts_does_not_count(value: Any, window: int, spaced: bool) -> None:
    """However it is cut into windows."""
    text = json.dumps(value, separators=None if spaced else (",", ":"))
    whole = shape.WINDOW
    shape.WINDOW = window
    try:
        found = b"".join(shape.outside_texts(text.encode()))
    finally:
        shape.WINDOW = whole
    nested, floats = counts(value)
    assert found.count(b"[") + found.count(b"{") == nested
    assert len(shape._FRACTION.findall(found)) == floats


@pytest.mark.parametrize(
    ("inside", "says"),
    [
        (b"1," * MAX_VALUES + b"1", f"values; accepted: up to {MAX_VALUES}"),
        (b"[]," * MAX_NESTED + b"[]", f"lists and objects; accepted: up to {MAX_NESTED}"),
        (b"1.5," * MAX_FRACTIONS + b"1e5", f"exponent; accepted: up to {MAX_FRACTIONS}"),
        (b" " * shape.SMALL + b"9" * (MAX_DIGITS + 1), f"accepted: up to {MAX_DIGITS}"),
    ],
)
def test_bodies_of_too_much(inside: bytes, says: str) -> None:
    body = b'{"prompt": "a", "user": [' + inside + b"]}"
    assert says in refusal(body).message
    few = inside.decode()
    assert read_completion(json.dumps({"prompt": "a", "user": few}).encode(), LIMITS)


def test_a_longer_model_takes_more_values() -> None:
    ids = b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}"
    long = msgspec.structs.replace(LIMITS, max_model_len=MAX_VALUES + 2)
    assert len(read_completion(ids, long).prompts[0]) == MAX_VALUES + 1


def test_names_that_nobody_knows_are_quoted_in_part() -> None:
    error = refusal(json.dumps({"prompt": "a", "x" * 9999: 1}).encode())
    assert "is not known" in error.message
    assert len(error.message) < 500


# -- what is counted after the text is read ------------------------------------------------


def test_products_have_limits() -> None:
    for tokens, n, scores, param in (
        (MAX_PROMPT_TOKENS, 2, None, "n"),
        (MAX_PROMPT_TOKENS // 4, 1, 21, "prompt_logprobs"),
    ):
        with pytest.raises(ApiError) as caught:
            LIMITS.check_prompts(tokens, n, scores)
        assert caught.value.param == param
        assert str(MAX_PROMPT_TOKENS) in caught.value.message
    long = msgspec.structs.replace(LIMITS, max_model_len=MAX_PROMPT_TOKENS)
    long.check_prompts(MAX_PROMPT_TOKENS - 1, 1, 2)  # scoring a prompt of full length
    few = dict.fromkeys(CHOSEN_IDS, 1)
    LIMITS.check_chosen_ids(few, MAX_CHOSEN_IDS // 4)
    with pytest.raises(ApiError, match=f"bad_words: .* accepted: up to {MAX_CHOSEN_IDS}"):
        LIMITS.check_chosen_ids(few | {"bad_words": 9}, MAX_CHOSEN_IDS // 4)


def test_the_page_has_every_limit() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE, re.MULTILINE))
    for name in {*MAX_ITEMS, *MAX_CHARS}:
        for limit in (MAX_ITEMS.get(name), MAX_CHARS.get(name)):
            assert limit is None or f"{limit:,}" in rows[name], name
    for limit in (MAX_VALUES, MAX_NESTED, MAX_FRACTIONS, MAX_DIGITS, MAX_PROMPT_TOKENS,
                  MAX_CHOSEN_IDS):  # fmt: skip
        assert f"{limit:,}" in PAGE


# -- how few tokens a text may have --------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 300, 256, [257])
    return Tokenizer.load(directory)


@given(st.text(max_size=50) | st.text("<|assistant> ", max_size=50))
def test_a_text_has_no_fewer_tokens(tokenizer: Tokenizer, text: str) -> None:
    special = "<|assistant|>" * len(text)  # one token of 13 bytes
    for each in (text, special):
        assert len(tokenizer.encode(each, False)) >= tokenizer.least_tokens(each)
    assert tokenizer.least_tokens(special) == len(special) // 13


def bpe(**parts: Any) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def fallback(missing: int | None = None, **parts: Any) -> tokenizers.Tokenizer:
    """Characters and pairs of them, and tokens for the bytes of others."""
    bytes_apart = [f"<0x{byte:02X}>" for byte in range(256) if byte != missing]
    vocab = {name: i for i, name in enumerate([*bytes_apart, "é", "\n", "éé"])}
    model = models.BPE(vocab=vocab, merges=[("é", "é")], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@given(st.text("é\na日", max_size=50))
def test_bytes_that_stand_in_for_characters(text: str) -> None:
    made = fallback()
    assert longest_bytes(made) == 4
    assert 4 * len(made.encode(text).ids) >= len(text.encode())


def test_where_there_is_no_bound() -> None:
    assert longest_bytes(bpe()) == 1
    assert longest_bytes(bpe(normalizer=normalizers.NFC())) == NFC_SHRINKS
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    removed = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), byte_level])
    swallows = bpe()
    swallows.add_special_tokens([tokenizers.AddedToken("<x>", lstrip=True)])
    assert len(swallows.encode(" " * 99 + "<x>").ids) == 1
    for lossy in (
        bpe(normalizer=normalizers.Strip()),
        bpe(normalizer=normalizers.NFKC()),
        bpe(pre_tokenizer=removed),
        bpe(pre_tokenizer=pre_tokenizers.Whitespace()),
        bpe(model=models.BPE(vocab={"a": 0}, merges=[])),
        swallows,
        fallback(missing=65),
        fallback(pre_tokenizer=removed),
        fallback(pre_tokenizer=pre_tokenizers.Metaspace()),
        fallback(model=models.BPE(vocab=fallback().get_vocab(), merges=[])),
    ):
        assert longest_bytes(lossy) is None


def test_how_far_nfc_shrinks() -> None:
    """A character's decomposition is at least a third of it, and at most three times."""
    for code in (*range(0xD800), *range(0xE000, 0x30000)):
        own = len(chr(code).encode())
        apart = len(unicodedata.normalize("NFD", chr(code)).encode())
        assert own <= 3 * apart
        assert apart <= 3 * own


# -- work that is done once, or elsewhere --------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=3 * PIECE))
def test_pieces_are_the_whole(values: list[int]) -> None:
    assert msgspec.json.encode({"a": in_pieces(values)}) == msgspec.json.encode({"a": values})


def test_bad_words_in_order_and_once(tokenizer: Tokenizer) -> None:
    words = ["b", "a", "b", " a"]
    spelled = [tokenizer.decode(ids, False) for ids in bad_word_ids(tokenizer, words)]
    assert spelled == ["b", " b", "a", " a"]


def test_sequences_share_what_they_can(tokenizer: Tokenizer) -> None:
    prepared = PreparedParams(SamplingParams(n=3, stop="x", bad_words=["a"]), tokenizer)
    assert [params.n for params in prepared.of_sequence] == [1, 1, 1]
    one = SamplingParams(seed=5)
    assert PreparedParams(one, tokenizer).of_sequence == [one]


def test_a_row_says_what_never_changes_once() -> None:
    """A step costs what changes in it, not what a request is allowed to say."""
    params = SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=[1, 2, 3], min_tokens=9,
                            stop_token_ids=[4])  # fmt: skip
    words = [[7], [8, 9], [5, 8, 6], [8, 7]]
    row = SamplingState(
        params=params,
        prompt_ids=[1],
        output_ids=[5, 8],
        position=3,
        eos_ids=[2],
        seed=0,
        bad_words=words,
    )
    for columns in (row.allowed, row.bias):
        (first,), (second,) = columns(), columns()
        assert first is second
    never, early, now = row.banned()
    assert [column.token.tolist() for column in (never, early)] == [[7], [2, 4]]
    assert sorted(now.token.tolist()) == [6, 9]
    assert [a is b for a, b in zip(row.banned(), (never, early, now), strict=True)] == [
        True, True, False,
    ]  # fmt: skip
    rows = build_rows([row, row])
    assert rows.banned is not None
    assert rows.banned.row.tolist() == [0] * 5 + [1] * 5


def test_offloaded_work() -> None:
    """In another thread, one after the other; what nobody waits for is not begun."""
    done: list[str] = []

    async def both() -> None:
        thread, start = OffloadThread(), threading.Event()
        first = asyncio.create_task(thread.run(start.wait))
        second = asyncio.create_task(thread.run(done.append, "second"))
        third = asyncio.create_task(thread.run(threading.current_thread))
        failing = asyncio.create_task(thread.run(int, "x"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        start.set()
        assert await first
        assert (await third).daemon
        with pytest.raises(ValueError, match="invalid literal"):
            await failing

    asyncio.run(both())
    assert done == []
