"""Tokenizers and streaming text. The oracle is decoding the whole sequence at once."""

from __future__ import annotations

import base64
import builtins
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from trueline.errors import UsageError
from trueline.text import tiktoken_model
from trueline.text.detokenize import Detokenizer
from trueline.text.tokenizer import Tokenizer, bad_word_ids
from trueline.tiny.tokenizer import write_tokenizer

Tiny = Callable[..., Path]

TEXTS = (
    "plain words",
    "naïve — 线性注意力 🙂👩‍👩‍👧‍👦",
    "e\u0301o\u0302 z\u0336a\u0336",
    " two  spaces\n\ttab\x00 ",
    "\ufffd real replacement \ufffd\ufffd",
    "<|user|>in the middle<|end|>",
    "",
)


def byte_level(directory: Path) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    write_tokenizer(directory, 300, 0, [299])
    return Tokenizer.load(directory)


WORDS = ("▁", "▁the", "▁cat", "s", "▁▁", "a", ".", "é", "界", "▁🙂")


def sentencepiece_like(directory: Path, decoder: Any, *, byte_fallback: bool = True) -> Tokenizer:
    """As Llama's: words with a leading space, bytes for the rest."""
    directory.mkdir(exist_ok=True)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    library = Library(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=byte_fallback,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    if decoder is not None:
        library.decoder = decoder
    library.add_special_tokens([AddedToken(n, special=True) for n in ("<unk>", "<s>", "</s>")])
    library.add_tokens([AddedToken("<think>", special=False)])
    library.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


def llama_decoder(vanishing: str = "\0") -> Any:
    return decoders.Sequence(
        [
            decoders.Replace(vanishing, ""),
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    home = tmp_path_factory.mktemp("vocabularies")
    metaspace = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return {
        "bytes": byte_level(home / "bytes"),
        "llama": sentencepiece_like(home / "llama", llama_decoder()),
        "vanishing": sentencepiece_like(home / "vanishing", llama_decoder("s")),
        "metaspace": sentencepiece_like(home / "metaspace", metaspace),
        "plain metaspace": sentencepiece_like(home / "plain", decoders.Metaspace()),
        "no decoder": sentencepiece_like(home / "none", None),
        "tiktoken": kimi(home / "tiktoken"),
    }


VOCABULARIES = (
    "bytes", "llama", "vanishing", "metaspace", "plain metaspace", "no decoder", "tiktoken"
)  # fmt: skip


def kimi(directory: Path, **changes: Any) -> Tokenizer:
    """A handmade tiktoken.model: every byte, and a few merges."""
    pytest.importorskip("tiktoken")
    directory.mkdir(exist_ok=True)
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", "你".encode()[:2], "你".encode()]
    lines = [base64.b64encode(t).decode() + f" {i}" for i, t in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(tokens)
    names = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 9: "<|tool|>"}
    config = {
        "added_tokens_decoder": {
            str(token): {"content": name, "special": name != "<|tool|>"}
            for token, name in names.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "additional_special_tokens": ["<|im_end|>"],
        **changes,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


# Streaming


def stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(data=st.data())
def test_stream_is_the_whole(kind: str, vocabularies: dict[str, Tokenizer], data: Any) -> None:
    """Random tokens: bytes that are no text, special tokens, ids beyond the vocabulary."""
    tokenizer = vocabularies[kind]
    high = tokenizer.vocab_size + 3
    likely = [t for text in TEXTS for t in tokenizer.encode(text, add_special_tokens=False)]
    token = st.integers(0, high) | st.sampled_from(likely) | st.integers(high - 25, high)
    ids = data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip)
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40))
    assert "".join(stream(Detokenizer(tokenizer, skip), ids, cuts)) == whole
    assert "".join(stream(Detokenizer(tokenizer, skip), ids, range(len(ids)))) == whole


@pytest.mark.parametrize("kind", VOCABULARIES)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_text(kind: str, text: str, vocabularies: dict[str, Tokenizer]) -> None:
    """No U+FFFD appears that is not in the end, and what has appeared stays."""
    tokenizer = vocabularies[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if kind in ("bytes", "tiktoken"):
        assert whole == text
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    seen = ""
    for token in ids:
        seen += detokenizer.push([token])
        assert whole.startswith(seen)
    assert seen + detokenizer.flush() == whole
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_are_replaced_as_the_library_does(
    vocabularies: dict[str, Tokenizer], values: list[int]
) -> None:
    tokenizer = vocabularies["bytes"]
    token_of = {tokenizer.token_bytes(token): token for token in range(300)}
    ids = [token_of[bytes([value])] for value in values]
    assert tokenizer.decode(ids, skip_special_tokens=False) == bytes(values).decode(
        "utf-8", "replace"
    )


def test_characters_wait_for_their_last_byte(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["bytes"]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push([t]) for t in tokenizer.encode("🙂a", add_special_tokens=False)]
    assert pieces == ["", "", "", "🙂", "a"]
    assert detokenizer.push(tokenizer.encode("🙂", add_special_tokens=False)[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_skipped_token_does_not_tear_a_character(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["bytes"]
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.eos_id is not None
    ids = [first, tokenizer.eos_id, second]
    assert "".join(stream(Detokenizer(tokenizer, True), ids, range(3))) == "é"
    assert "".join(stream(Detokenizer(tokenizer, False), ids, range(3))) == "\ufffd<|end|>\ufffd"


def test_one_wrong_byte_spoils_its_run(vocabularies: dict[str, Tokenizer]) -> None:
    """The library's rule for byte fallback; so a run cannot be shown before it is over."""
    tokenizer = vocabularies["llama"]
    ids = [3 + byte for byte in "你".encode()]
    assert tokenizer.decode([*ids, 3 + 0xFF], True) == "\ufffd" * 4
    detokenizer = Detokenizer(tokenizer, True)
    assert [detokenizer.push([token]) for token in ids] == ["", "", ""]
    assert detokenizer.push([259 + WORDS.index("▁cat")]) == "你 cat"


def test_tokens_without_text_leave_the_space_alone(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["vanishing"]
    ids = [259 + WORDS.index(word) for word in ("▁", "s", "s", "▁cat", "s", "▁cat")]
    assert tokenizer.decode(ids, True) == " cat cat"
    assert "".join(stream(Detokenizer(tokenizer, True), ids, range(6))) == " cat cat"


@pytest.mark.parametrize("kind", ["llama", "metaspace", "plain metaspace"])
def test_text_that_continues_keeps_its_space(kind: str, vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies[kind]
    ids = [259 + WORDS.index("▁cat"), 259 + WORDS.index("s")]
    assert Detokenizer(tokenizer, True).push(ids) == "cats"
    assert Detokenizer(tokenizer, True, continues=True).push(ids) == " cats"
    assert [tokenizer.token_text(token) for token in ids] == [" cat", "s"]


def test_streaming_is_linear(vocabularies: dict[str, Tokenizer]) -> None:
    """Counts work, not time: how many tokens the library decodes, also in runs without text."""
    tokenizer = vocabularies["llama"]
    vocabulary = tokenizer.vocabulary
    decoded = 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(vocabulary, name)

        def decode(self, ids: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return vocabulary.decode(ids)

    for ids in ([259 + 1] * 400, [3 + 0xFF] * 400 + [260], [259] * 400, [259 + 4, 3] * 200):
        decoded = 0
        detokenizer = Detokenizer(tokenizer, True)
        detokenizer._stream._vocabulary = Counting()  # type: ignore[union-attr]
        for token in ids:
            detokenizer.push([token])
        assert decoded <= 8 * len(ids)


# Files


def test_tiny_models_have_one(tiny: Tiny) -> None:
    tokenizer = Tokenizer.load(tiny("deepseek_v3"))
    assert tokenizer.bos_id == 256
    assert tokenizer.eos_ids == (tokenizer.eos_id,)
    assert tokenizer.special_ids >= {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert tokenizer.encode("é") == tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.token_text(tokenizer.encode("é")[0]) == "\ufffd"
    assert tokenizer.token_bytes(tokenizer.encode("é")[0]) == b"\xc3"
    assert tokenizer.token_text(256) == "<|begin|>"
    assert tokenizer.token_text(tokenizer.vocab_size + 40) == ""
    assert tokenizer.decode([256, 10**6], skip_special_tokens=True) == ""


def change(directory: Path, file: str = "tokenizer_config.json", **keys: Any) -> None:
    path = directory / file
    stored = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(stored | keys))


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({}, ["<|begin|>"], []),  # the post-processor of tokenizer.json
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True}, ["<|begin|>"], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|begin|>"], ["<|end|>"]),
        ({"add_eos_token": True}, [], ["<|end|>"]),
    ],
)
def test_ends(keys: dict[str, Any], before: list[str], after: list[str], tmp_path: Path) -> None:
    byte_level(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", library.token_to_id("<|begin|>"))]
    )
    library.enable_truncation(3)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, **keys)
    tokenizer = Tokenizer.load(tmp_path)
    text = "longer than three"
    assert tokenizer.decode(tokenizer.encode(text), False) == "".join([*before, text, *after])
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False) == text


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    byte_level(tmp_path)
    change(tmp_path, "generation_config.json", eos_token_id=[299, 17])
    assert Tokenizer.load(tmp_path).eos_ids == (299, 17)
    change(tmp_path, "generation_config.json", eos_token_id=5)
    assert Tokenizer.load(tmp_path).eos_ids == (299, 5)


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    """Only tokenizer_config.json knows two tokens, and calls another one special."""
    size = byte_level(tmp_path).vocab_size
    user = Tokenizer.load(tmp_path).encode("<|user|>", add_special_tokens=False)
    added = {
        str(size): {"content": "<tool>", "special": False},
        str(size + 1): {"content": "<secret>", "special": True},
        str(user[0]): {"content": "<|user|>", "special": False},
    }
    change(tmp_path, added_tokens_decoder=added, additional_special_tokens=["x"])
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("<tool><secret><|user|>xy")
    assert len(ids) == 5
    assert ids[:2] == [size, size + 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool><|user|>y"
    assert tokenizer.vocab_size == size + 2
    change(tmp_path, added_tokens_decoder={str(size + 5): {"content": "<tool>"}})
    with pytest.raises(UsageError, match=f"'<tool>' gets id {size}.*says {size + 5}"):
        Tokenizer.load(tmp_path)


def test_named_tokens_may_stand_in_the_older_file(tmp_path: Path) -> None:
    byte_level(tmp_path)
    change(tmp_path, eos_token=None)
    assert Tokenizer.load(tmp_path).eos_id is None
    change(tmp_path, "special_tokens_map.json", eos_token={"content": "<|end|>"})
    assert Tokenizer.load(tmp_path).eos_id == 299
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).bos_id is None


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", None, "tokenizer.json: no such file"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"bos_token": "<x>"}', "bos_token = '<x>' is not in the voc"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token = 'yes'"),
        ("tokenizer_config.json", '{"add_bos_token": true}', "there is no bos_token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 1}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template holds '1'"),
        ("tokenizer_config.json", "\udcff", "cannot be read"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id = 'x'"),
        ("chat_template.jinja", "\udcff", "cannot be read"),
    ],
)
def test_broken_files(file: str, text: str | None, part: str, tmp_path: Path) -> None:
    byte_level(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as caught:
        Tokenizer.load(tmp_path)
    assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("decoder", "part"),
    [
        (decoders.CTC(), "'CTC' cannot be streamed"),
        (decoders.BPEDecoder(), "'BPEDecoder' cannot be streamed"),
        (decoders.Strip(" ", 0, 1), "that cuts the end"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "b")]), "after Fuse"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]), "ByteLevel alone"),
    ],
)
def test_decoders_that_cannot_be_streamed(decoder: Any, part: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=part):
        sentencepiece_like(tmp_path, decoder)


def test_half_a_surrogate_pair_is_refused(vocabularies: dict[str, Tokenizer]) -> None:
    for tokenizer in vocabularies.values():
        with pytest.raises(UsageError, match="character 2 is half"):
            tokenizer.encode("ab\ud83d")


def test_bad_words(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["tiktoken"]
    found = bad_word_ids(tokenizer, ["hello", " wide"])
    assert [tokenizer.decode(ids, False) for ids in found] == ["hello", " hello", " wide"]


# Templates


def test_template_files_win(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert Tokenizer.load(tmp_path).chat_template() == Tokenizer.load(tmp_path).chat_template(
        with_tools=True
    )
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    change(tmp_path, chat_template=named)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template() == "d"
    assert tokenizer.chat_template(with_tools=True) == "t"
    with pytest.raises(UsageError, match=r"no chat template 'rag' \(it has default, tool_use\)"):
        tokenizer.chat_template("rag")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(tmp_path).chat_templates == {"default": "from the file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert Tokenizer.load(tmp_path).chat_template("rag") == "r"


def test_no_template(tmp_path: Path) -> None:
    byte_level(tmp_path)
    change(tmp_path, chat_template=None)
    with pytest.raises(UsageError, match="it has none"):
        Tokenizer.load(tmp_path).chat_template()


# Kimi's tiktoken.model


def test_kimi(vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies["tiktoken"]
    first = 256 + 7
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (first, (first + 1,))
    assert tokenizer.vocab_size == first + 256
    text = "hello world 你好<|im_end|><|tool|><|reserved_token_270|>"
    ids = tokenizer.encode(text)
    assert ids[:2] == [259, 260]
    assert ids[-3:] == [first + 2, first + 9, 270]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # what is not marked special stays, as the names of tool calls must
    assert tokenizer.decode(ids, True) == text.replace("<|im_end|>", "")
    assert tokenizer.sorts_tools


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello WORLDs it's 12345", ["Hello", " WORLDs", " it's", " ", "123", "45"]),
        ("线性attention注意", ["线性", "attention", "注意"]),
        ("a  b\n\nc", ["a", " ", " b", "\n\n", "c"]),
        ("x = f(y);\n", ["x", " =", " f", "(y", ");\n"]),
    ],
)
def test_kimi_splits_words(text: str, words: list[str]) -> None:
    """Merges never cross these borders: a vocabulary of exactly these words finds them."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)}
    for word in words:
        spelled = word.encode()
        for end in range(2, len(spelled) + 1):  # each made of its beginning and a byte
            ranks.setdefault(spelled[:end], len(ranks))
    encoding = tiktoken.Encoding(
        "test", pat_str=tiktoken_model.SPLIT, mergeable_ranks=ranks, special_tokens={}
    )
    assert [encoding.decode([token]) for token in encoding.encode(text)] == words


def test_kimi_cuts_long_texts() -> None:
    run = tiktoken_model.MAX_RUN
    assert list(tiktoken_model.parts("")) == []
    assert list(tiktoken_model.parts("a b  c")) == ["a b  c"]
    assert list(tiktoken_model.parts("ab " + "x" * run + " y")) == ["ab " + "x" * run + " y"]
    text = "ab " + "x" * (2 * run + 1) + " " * (run + 2) + "y"
    assert [len(part) for part in tiktoken_model.parts(text)] == [
        3 + run, run, 1 + run, 3
    ]  # fmt: skip
    assert "".join(tiktoken_model.parts(text)) == text
    long = "word " * 100_000
    assert [len(part) for part in tiktoken_model.parts(long)] == [400_000, 100_000]


def test_tiktoken_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kimi(tmp_path)
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tiktoken":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"pip install 'trueline\[tiktoken\]'"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"added_tokens_decoder": {}}, "no added_tokens_decoder"),
        ({"added_tokens_decoder": {"5": {"content": "[BOS]"}}}, "has id 5, but tiktoken.model"),
        (
            {"added_tokens_decoder": {str(i): {"content": "[BOS]"} for i in (263, 264)}},
            "'[BOS]' has two ids",
        ),
    ],
)
def test_broken_kimi_config(changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        kimi(tmp_path, **changes)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("line", "part"),
    [("%%% 263", "line 264"), ("YQ== x", "line 264"), ("YWI= 999", "ranks that are not")],
)
def test_broken_ranks(line: str, part: str, tmp_path: Path) -> None:
    kimi(tmp_path)
    with (tmp_path / "tiktoken.model").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=part):
        Tokenizer.load(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    with pytest.raises(UsageError, match="no token for byte 0"):
        Tokenizer.load(tmp_path)
