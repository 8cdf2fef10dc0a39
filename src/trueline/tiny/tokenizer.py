"""Tokenizers for models that have never seen text: every byte is a token, or every token a word."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trueline.errors import UsageError

SPECIALS = {
    name: 256 + i
    for i, name in enumerate(
        ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
    )
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message.role + ' is not known') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(directory: Path, vocab_size: int, bos: int | None, eos: Iterable[int]) -> None:
    """Bytes get ids from 0 up, around the special tokens; `bos` and `eos` keep the ids that the
    config gives them."""
    eos_ids = list(eos)
    needed = 256 + len(SPECIALS)
    if vocab_size < needed:
        raise UsageError(f"vocab_size = {vocab_size}: accepted: {needed} or more, for every byte")
    fixed = {"<|begin|>": bos, "<|end|>": eos_ids[0] if eos_ids else None}
    vocab: dict[str, int] = {
        name: token for name, token in fixed.items() if token is not None and token < vocab_size
    }
    if len(set(vocab.values())) < len(vocab):  # one id for both ends
        del vocab["<|begin|>"]
    free = (i for i in range(vocab_size) if i not in set(vocab.values()))
    for name in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIALS):
        if name not in vocab:
            vocab[name] = next(free)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Every id spells a word of its own, so that every token a model can draw has text. It reads
    no text: it has no single characters to begin with."""
    space = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" ")
    vocab = {space[0][0] + _word(token): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def _word(number: int) -> str:
    letters = chr(ord("a") + number % 26)
    while number := number // 26:
        letters += chr(ord("a") + number % 26)
    return letters
