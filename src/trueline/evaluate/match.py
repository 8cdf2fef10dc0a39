"""Whether a text has the answer. A match is a function (text, answer) -> (what it found, right)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal

Match = Callable[[str, str], tuple[str | None, bool]]

# A hyphen after a digit, a letter or a bracket is a subtraction. Commas count between groups of
# three only: "2,3" is two numbers.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-−]\$?|\$[-−])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
MARKED = re.compile(r"####\s*\$?(" + NUMBER.pattern + ")")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Or a character behind a backslash: \\{ is no brace."""
BOXED = re.compile(r"\\boxed\s*\{")
WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mathsf|mathit|boxed|bf|rm)\s*\{")
SPACING = re.compile(r"\\[,;:! ]|\\(?:quad|qquad)\b|[$~]")


def without_reasoning(text: str, prompt: str = "") -> str:
    """What follows a model's reasoning. Of an output that ends inside it, nothing. `prompt`: as
    the chat template rendered it; some open the reasoning at its end."""
    _, ended, answer = text.rpartition("</think>")
    if ended:
        return answer
    if prompt.rstrip().endswith("<think>"):
        return ""
    return text.partition("<think>")[0]


def as_number(text: str) -> Decimal | None:
    """A text that is a number and nothing else, as people write it: $1,234.50, 18., −5, 12 %."""
    bare = text.strip().removesuffix("%").rstrip().removesuffix(".")
    if bare.startswith("$"):
        bare = bare[1:]
    if not NUMBER.fullmatch(bare):
        return None
    return Decimal(re.sub(r"[$,]", "", bare).replace("−", "-"))


def same_number(found: str, answer: str) -> bool:
    value = as_number(found)
    return value is not None and value == as_number(answer)


def marked_number(text: str) -> str | None:
    """The number after the first ####, as lm-evaluation-harness takes it."""
    found = MARKED.search(text)
    return found[1] if found else None


def last_number(text: str) -> str | None:
    found = None
    for match in NUMBER.finditer(text):
        found = match[0]
    return found


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} that is closed, without what only changes its looks."""
    starts = {found.end() for found in BOXED.finditer(text)}
    closed = {start: end for start, end in _braces(text) if start in starts}
    if not closed:
        return None
    last = max(closed)
    return _plain(text[last : closed[last]])


def _braces(text: str) -> Iterator[tuple[int, int]]:
    """Where the content of each closed pair begins and ends. One pass: a model that repeats itself
    opens thousands of boxes."""
    opened = []
    for found in BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.end())
        elif found[0] == "}" and opened:
            yield opened.pop(), found.start()


def _plain(content: str) -> str:
    bare = SPACING.sub(" ", content.replace("{,}", ",")).strip()
    wrapped = WRAPPED.match(bare)
    while wrapped and (wrapped.end(), len(bare) - 1) in _braces(bare):
        bare = bare[wrapped.end() : -1].strip()
        wrapped = WRAPPED.match(bare)
    return bare


def strict(text: str, answer: str) -> tuple[str | None, bool]:
    found = marked_number(text)
    return found, found is not None and same_number(found, answer)


def flexible(text: str, answer: str) -> tuple[str | None, bool]:
    found = last_number(text)
    return found, found is not None and same_number(found, answer)


def boxed(text: str, answer: str) -> tuple[str | None, bool]:
    found = last_boxed(text)
    return found, found is not None and (found == answer.strip() or same_number(found, answer))


def exact(text: str, answer: str) -> tuple[str | None, bool]:
    found = text.strip()
    return found, found == answer.strip()


def contains(text: str, answer: str) -> tuple[str | None, bool]:
    right = answer in text
    return answer if right else None, right


def regex(text: str, answer: str) -> tuple[str | None, bool]:
    found = re.search(answer, text)
    return found and found[0], found is not None


MATCHES: dict[str, Match] = {
    "strict": strict,
    "flexible": flexible,
    "boxed": boxed,
    "exact": exact,
    "number": flexible,
    "contains": contains,
    "regex": regex,
}


def unusable(name: str, answer: str) -> str | None:
    """What this match accepts as an item's answer, where it is something else."""
    if name in ("strict", "flexible", "number") and as_number(answer) is None:
        return "a number"
    if name == "regex":
        try:
            re.compile(answer)
        except re.error as error:
            return f"a regular expression ({error})"
    return None
