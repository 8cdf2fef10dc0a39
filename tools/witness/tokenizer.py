"""The tokenizer of the built-in models, trained on the training split.

Byte pair encoding over words with their leading space, digits one by one, and a token for every
byte, for characters that the stories do not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trueline.tasks import stories
from trueline.tiny.tokenizer import CHAT_TEMPLATE, SPECIALS

SPECIAL = tuple(SPECIALS)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
VOCAB_SIZE = 1536
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
SHARES = {"2 operations": 40_000, "5 operations": 40_000, "recall": 3_000, "long": 3_000,
          "other": 60_000, "1 operation": 10_000}  # fmt: skip


def texts() -> Iterator[str]:
    for category, count in SHARES.items():
        for problem in islice(stories.stream(category, "train", seed=1), count):
            yield f"{problem.question}\n{problem.solution}"


def train() -> Tokenizer:
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(BYTES),
        initial_alphabet=[*(chr(code) for code in range(32, 127)), "\n"],
        limit_alphabet=96,
        show_progress=False,
    )
    learned.train_from_iterator(texts(), trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = {name: token for token, name in enumerate((*SPECIAL, *BYTES, *pieces))}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = learned.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path) -> None:
    # one entry a line would be 3,000 lines
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(text + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def is_whole(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


if __name__ == "__main__":
    import sys

    made = train()
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write(made, out)
    for text in ("Nora has 24 marbles.", "Ünï 日本 🙂\t\n\n x", "  two  spaces "):
        assert is_whole(made, text), text
    long = stories.problems("long", "test", 500)
    sizes = [len(made.encode(problem.question).ids) for problem in long]
    print("long questions:", min(sizes), sum(sizes) // len(sizes), max(sizes))
    print(made.encode(stories.problems("3 operations", "test", 1)[0].question).tokens)
    print(len([p for p in made.get_vocab() if re.fullmatch(" ?[A-Za-z]{3,}", p)]), "words")
