"""What is asked: a question with its known answer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from trueline.utils.json_types import JSON

Prompt = str | list[JSON]
"""Text to continue, or the messages of a chat."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    question: Prompt
    answer: str
    category: str = ""
    solution: str = ""
    """The worked answer, where the data has one: what a few-shot prompt shows."""


def item_id(task: str, question: Prompt) -> str:
    """The same for the same question of a task, whatever stands around it in file or prompt."""
    content = msgspec.json.encode([task, question], order="deterministic")
    return hashlib.sha256(content).hexdigest()[:16]


def with_ids(task: str, items: Iterable[Item]) -> list[Item]:
    """Items without an id get one; equal questions are told apart by a number."""
    seen: Counter[str] = Counter()
    found = []
    for item in items:
        name = item.id or item_id(task, item.question)
        seen[name] += 1
        suffix = f"-{seen[name]}" if seen[name] > 1 else ""
        found.append(msgspec.structs.replace(item, id=name + suffix))
    return found


def digest(items: Iterable[Item], prompts: Iterable[Prompt]) -> str:
    """Of all that is asked and what counts as right."""
    content = [[item.id, item.answer, item.category] for item in items], list(prompts)
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:16]
