"""The tasks: where items come from, what they look like as a prompt, and which matches score them.
The built-in one is made by `trueline.tasks`; the others read JSONL in published forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trueline.errors import UsageError, did_you_mean, short
from trueline.evaluate.items import Item, Prompt, with_ids
from trueline.evaluate.jsonl import Line, read_lines
from trueline.evaluate.match import MATCHES, Match, as_number, unusable
from trueline.tasks import stories as generator

CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's annotations of a calculation: they are no part of the solution's text."""
GSM8K_INSTRUCTION = (
    "Solve the problem step by step. End with a line that has #### and then the answer as a number."
)
DEFAULT_STORIES = 1000
AIME_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: str
    items: tuple[Item, ...]
    matches: dict[str, Match]
    """By name; the first one is what `diff` compares unless told otherwise."""
    is_question_and_answer: bool = False
    """A completion prompt then says "Question: …" and "Answer:"; else it is the question alone."""
    instruction: str = ""
    """Said after the question where there are no examples."""
    stop: tuple[str, ...] = ()
    """Of a completion: where the next question would begin."""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlKeys:
    """Which keys of a line hold what, and how answers are matched."""

    prompt: str = "prompt"
    answer: str = "answer"
    category: str | None = None
    matches: Sequence[str] = field(default=("exact",))


def stories(categories: Sequence[str] = (), limit: int | None = None) -> Task:
    """Held-out problems of the built-in generator, as many of each category; without categories,
    those of 2 to 5 operations."""
    for name in categories:
        check_category(name, generator.CATEGORIES)
    chosen = generator.CATEGORIES if "all" in categories else dict.fromkeys(categories)
    wanted = DEFAULT_STORIES if limit is None else _checked_limit(limit)
    names = list(chosen or generator.ARITHMETIC)
    items = [
        Item(id="", question=one.question, answer=one.answer, category=name, solution=one.solution)
        for place, name in enumerate(names)
        for one in generator.problems(name, "test", (wanted + len(names) - 1 - place) // len(names))
    ]
    return Task(
        name="stories",
        items=tuple(with_ids("stories", items)),
        matches={"answer": _story_match},
        max_tokens=256,
    )


def _story_match(text: str, answer: str) -> tuple[str | None, bool]:
    return generator.answer_in(text), generator.is_right(answer, text)


def gsm8k(file: Path) -> Task:
    return Task(
        name="gsm8k",
        items=_read(file, "gsm8k", read_gsm8k_line),
        matches={name: MATCHES[name] for name in ("strict", "flexible")},
        is_question_and_answer=True,
        instruction=GSM8K_INSTRUCTION,
        stop=("Question:",),
        max_tokens=512,
    )


def aime(file: Path) -> Task:
    return Task(
        name="aime",
        items=_read(file, "aime", _read_aime_line),
        matches={"boxed": MATCHES["boxed"]},
        is_question_and_answer=True,
        instruction=AIME_INSTRUCTION,
        stop=("Question:",),
    )


def jsonl(file: Path, keys: JsonlKeys) -> Task:
    return Task(
        name="jsonl",
        items=_read(file, "jsonl", lambda line: _read_jsonl_line(line, keys)),
        matches={name: MATCHES[name] for name in keys.matches},
        max_tokens=512,
    )


def few_shot_examples(file: Path, count: int) -> tuple[Item, ...]:
    """The first ones of a GSM8K file, without calculator annotations."""
    items = _read(file, "gsm8k", read_gsm8k_line)
    if count > len(items):
        raise UsageError(f"--num-fewshot {count}: {file} has {len(items)} items")
    return items[:count]


def _read(file: Path, task: str, read: Callable[[Line], Item]) -> tuple[Item, ...]:
    items: list[Item] = []
    given: dict[str, int] = {}
    for line in read_lines(file):
        item = read(line)
        if item.id in given:
            raise line.refusal("id", f"ids that differ; line {given[item.id]} has the same")
        if item.id:
            given[item.id] = line.number
        items.append(item)
    return tuple(with_ids(task, items))


def _given_id(line: Line) -> str:
    return line.scalar("id") if "id" in line.fields else ""


def read_gsm8k_line(line: Line) -> Item:
    solution = CALCULATOR.sub("", line.text("answer"))
    _, marker, answer = solution.rpartition("####")
    if not marker or as_number(answer) is None:
        raise line.refusal("answer", "a solution that ends with #### and a number")
    return Item(
        id=_given_id(line),
        question=line.text("question"),
        answer=answer.strip(),
        solution=solution.strip(),
    )


def _read_aime_line(line: Line) -> Item:
    question = line.text("problem", "question")
    key = line.key("answer")
    value = line.fields[key]
    text = str(value).strip()
    if isinstance(value, bool | float) or not re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        raise line.refusal(key, 'an integer of up to 18 digits, as 73 or "073"')
    return Item(id=_given_id(line), question=question, answer=str(int(text)))


def _read_jsonl_line(line: Line, keys: JsonlKeys) -> Item:
    answer = line.scalar(keys.answer)
    for name in keys.matches:
        if (accepted := unusable(name, answer)) is not None:
            raise line.refusal(keys.answer, f"{accepted}, for --match {name}")
    category = line.scalar(keys.category) if keys.category else ""
    question = _question(line, line.key(keys.prompt))
    return Item(id=_given_id(line), question=question, answer=answer, category=category)


def _question(line: Line, key: str) -> Prompt:
    value = line.fields[key]
    if not isinstance(value, list):
        return line.text(key)
    for message in value:
        said = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not said or not isinstance(message.get("content"), str | list):
            raise line.refusal(key, "text, or messages as {'role': …, 'content': …}")
    if not value:
        raise line.refusal(key, "at least one message")
    return value


def select(
    items: Iterable[Item], categories: Sequence[str] = (), limit: int | None = None
) -> tuple[Item, ...]:
    """Those of the categories, and the first `limit` of them."""
    found = tuple(items)
    known = sorted({item.category for item in found if item.category})
    for name in categories:
        check_category(name, known)
    if categories and "all" not in categories:
        found = tuple(item for item in found if item.category in categories)
    return found if limit is None else found[: _checked_limit(limit)]


def _checked_limit(limit: int) -> int:
    if limit < 1:
        raise UsageError(f"--limit {limit}: accepted: numbers from 1 up")
    return limit


def check_category(name: str, known: Sequence[str]) -> None:
    if name != "all" and name not in known:
        listed = short(", ".join(f"'{each}'" for each in known), 400)
        has = f"'all', {listed}" if known else "none: no item has one"
        raise UsageError(f"--category '{name}': accepted: {has}{did_you_mean(name, known)}")
