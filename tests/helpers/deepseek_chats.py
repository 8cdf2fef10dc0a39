"""Tokenizers of DeepSeek-V3.2 and V4 checkpoints: their special tokens, and no template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from trueline.text.tokenizer import Tokenizer
from trueline.tiny.tokenizer import write_tokenizer

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A, R = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
T, N = "<think>", "</think>"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
TOKENS = (B, E, U, A, R, T, N, *(f"<｜{task}｜>" for task in TASKS))


def make(directory: Path, tokens: tuple[str, ...] = TOKENS, **config: Any) -> Tokenizer:
    write_tokenizer(directory, 290, 256, [257])
    library = Library.from_file(str(directory / "tokenizer.json"))
    library.add_special_tokens([AddedToken(name, special=True) for name in tokens])
    library.save(str(directory / "tokenizer.json"))
    named = {"bos_token": B, "eos_token": E} if tokens == TOKENS else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"} | config))
    return Tokenizer.load(directory)
