"""Samples: a model's outputs with their scores, and the file that keeps them, a line a sample."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from trueline.errors import UsageError
from trueline.evaluate.items import Prompt

FILE = "samples.jsonl"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One of the outputs for an item, scored. It has no times: the same run gives the same line."""

    item: str
    sample: int
    """From 0; above where an item is answered several times."""
    category: str
    prompt: Prompt
    rendered_prompt: str | None
    """By the chat template, where the engine did it here."""
    prompt_tokens: int | None
    answer: str
    text: str
    reasoning: str | None
    """Where a server returns it apart from the text."""
    extracted: dict[str, str | None]
    """By match: what was taken for the answer."""
    right: dict[str, bool]
    """By match. An output that ended in error is wrong."""
    generated_tokens: int
    finish_reason: str
    error: str | None

    @property
    def key(self) -> tuple[str, int]:
        return self.item, self.sample


_decoder = msgspec.json.Decoder(Sample)


def encode(sample: Sample) -> bytes:
    return msgspec.json.encode(sample) + b"\n"


def read_samples(file: Path) -> tuple[list[Sample], int]:
    """Its samples, and how many bytes they take: fewer than the file has where its last line is
    torn, because whoever wrote it was killed."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: not readable ({error})") from error
    whole = content.rfind(b"\n") + 1
    found = []
    for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
        try:
            found.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{file}, line {number}: not a sample ({error})") from error
    return found, whole


def latest(samples: Iterable[Sample]) -> dict[tuple[str, int], Sample]:
    """Of each item's samples, the last that was written: one that ended in error is tried again."""
    return {sample.key: sample for sample in samples}
