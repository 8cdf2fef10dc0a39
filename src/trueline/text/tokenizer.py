"""A model's tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from trueline.errors import UsageError


def load_tokenizer(model: Path) -> Tokenizer:
    file = model / "tokenizer.json"
    if not file.is_file():
        raise UsageError(f"{file}: no such file; accepted: a tokenizer.json, or token ids instead")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any bad file
        raise UsageError(f"{file}: not a tokenizer ({error})") from error
