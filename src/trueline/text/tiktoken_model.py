"""Kimi's vocabulary: a tiktoken.model, whose special tokens stand in tokenizer_config.json.

The file has a line for each token, its bytes in base64 and its rank; the rank is the id. Special
tokens follow; ids that nobody named are reserved. Long texts are cut where Moonshot's own
tokenizer cuts them, since a cut changes ids.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path

from trueline.errors import UsageError
from trueline.text.files import AddedToken
from trueline.utils.model_files import TIKTOKEN, TOKENIZER_CONFIG

NUM_RESERVED = 256
MAX_TEXT = 400_000
MAX_RUN = 25_000
"""Characters of white space, or of anything else. Longer runs overflow tiktoken's stack."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TiktokenVocabulary:
    spells_bytes = True

    def __init__(self, file: Path, added: Sequence[AddedToken], special: Sequence[str]) -> None:
        try:
            import tiktoken
        except ImportError:
            raise UsageError(
                f"{file}: reading it needs tiktoken; install it: pip install 'trueline[tiktoken]'"
            ) from None
        ranks = _read_ranks(file)
        self._specials = _special_tokens(file, len(ranks), added)
        self._encoding = tiktoken.Encoding(
            str(file), pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=self._specials
        )
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {token: name.encode() for name, token in self._specials.items()}
        self.size = max(self._bytes, default=-1) + 1
        self.longest_bytes: int | None = max(map(len, self._bytes.values()))
        flagged = {token.id for token in added if token.special}
        flagged |= {self._specials[name] for name in special if name in self._specials}
        self.flagged = frozenset(flagged)
        self.added = frozenset(self._specials.values())

    def token_id(self, token: str) -> int | None:
        return self._specials.get(token)

    def encode(self, text: str, with_ends: bool) -> list[int]:
        return [
            token
            for part in parts(text)
            for token in self._encoding.encode(part, allowed_special="all")
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UsageError(
                f"{file}: line {number} is {line[:40]!r}; accepted: base64 and a rank ({error})"
            ) from error
    # every byte has to be a token, or some text could not be written
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        what = f"no token for byte {missing[0]}" if missing else "ranks that are not 0, 1, 2, …"
        raise UsageError(f"{file}: {len(ranks)} tokens, {what}; the file is incomplete")
    return ranks


def _special_tokens(file: Path, first: int, added: Sequence[AddedToken]) -> dict[str, int]:
    config = file.with_name(TOKENIZER_CONFIG)
    if not added:
        raise UsageError(
            f"{config}: no added_tokens_decoder; {TIKTOKEN} needs it for special tokens"
        )
    if added[0].id < first:
        raise UsageError(
            f"{config}: added token '{added[0].content}' has id {added[0].id}, but {file.name} "
            f"has the ids up to {first - 1}"
        )
    end = max(first + NUM_RESERVED, added[-1].id + 1)
    names = {token: f"<|reserved_token_{token}|>" for token in range(first, end)}
    names |= {token.id: token.content for token in added}
    ids = {name: token for token, name in names.items()}
    if len(ids) < len(names):
        twice = next(name for token, name in names.items() if ids[name] != token)
        raise UsageError(f"{config}: added token '{twice}' has two ids; accepted: one for each")
    return ids


def parts(text: str) -> Iterator[str]:
    """The text in pieces that are tokenized apart: one for nearly all texts."""
    for start in range(0, len(text), MAX_TEXT):
        part = text[start : start + MAX_TEXT]
        cuts = [
            cut
            for run in re.finditer(r"\s+|\S+", part)
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        ]
        for begin, end in zip([0, *cuts], [*cuts, len(part)], strict=True):
            yield part[begin:end]
