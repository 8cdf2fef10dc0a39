"""What a model is given for an item: one text to continue, or a chat."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.errors import UsageError
from trueline.evaluate.items import Item, Prompt
from trueline.utils.json_types import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    chat: bool
    examples: tuple[Item, ...] = ()
    """Of a few-shot prompt. In a chat each is a turn of user and assistant."""
    instruction: str = ""
    """After the question where no example shows how an answer is to be written."""
    system: str = ""
    """Of a chat."""
    is_question_and_answer: bool = False

    def prompt(self, item: Item) -> Prompt:
        return self._messages(item) if self.chat else self._text(item)

    def _messages(self, item: Item) -> list[JSON]:
        messages = [_message("system", self.system)] if self.system else []
        for example in self.examples:
            messages.append(_message("user", _plain_text(example)))
            messages.append(_message("assistant", example.solution))
        if isinstance(item.question, list):
            if self.instruction:
                raise UsageError(
                    f"--instruction: item {item.id} is a list of chat messages, which are sent as "
                    "they are; write it into them, or use --system"
                )
            return messages + item.question
        return [*messages, _message("user", self._question(item))]

    def _text(self, item: Item) -> str:
        if not self.is_question_and_answer:
            return self._question(item)
        shown = [
            f"Question: {_plain_text(example)}\nAnswer: {example.solution}\n\n"
            for example in self.examples
        ]
        return "".join(shown) + f"Question: {self._question(item)}\nAnswer:"

    def _question(self, item: Item) -> str:
        question = _plain_text(item)
        if self.instruction and not self.examples:
            question += f"\n\n{self.instruction}"
        return question

    def describe(self) -> str:
        form = "chat" if self.chat else "completion"
        return f"{form}, {len(self.examples)}-shot" if self.examples else f"{form}, zero-shot"


def _message(role: str, content: str) -> JSON:
    return {"role": role, "content": content}


def _plain_text(item: Item) -> str:
    if isinstance(item.question, str):
        return item.question
    raise UsageError(
        f"item {item.id} is a list of chat messages; accepted where the model has a chat template, "
        "without --no-chat"
    )
