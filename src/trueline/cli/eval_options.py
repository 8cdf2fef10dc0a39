"""The options of `trueline eval`: what is asked, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trueline.cli.remote import parse_fields
from trueline.errors import UsageError
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from trueline.engine.params import SamplingParams
    from trueline.evaluate.items import Item
    from trueline.evaluate.prompts import PromptFormat
    from trueline.evaluate.tasks import JsonlKeys, Task

DEFAULT_FEWSHOT = 5


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What is asked."""

    task: Literal["stories", "gsm8k", "aime", "jsonl"] = "stories"
    """stories is built in: arithmetic word problems that no built-in model was trained on."""
    data: Path | None = None
    """The items of gsm8k, aime and jsonl: a JSONL file."""
    limit: int | None = None
    """Only the first so many items; of stories, so many spread over the categories (1000)."""
    category: tuple[str, ...] = ()
    """Only items of this category; all: of every one. May be given several times."""
    prompt_key: str | None = None
    """Of jsonl: the key of a text or of a list of chat messages ("prompt")."""
    answer_key: str | None = None
    """Of jsonl: the key of a text or a number ("answer")."""
    category_key: str | None = None
    """Of jsonl: the key of a category; without it items have none."""
    match: tuple[Literal["exact", "number", "strict", "boxed", "contains", "regex"], ...] = ()
    """Of jsonl: the output is the answer (exact, the default); its last number is (number), its
    number after #### (strict), its last \\boxed{} (boxed); has it somewhere (contains); is found by
    it (regex). May be given several times."""

    def read(self) -> Task:
        from trueline.evaluate import tasks

        if self.task != "jsonl":
            self._refuse_others("jsonl", "prompt_key", "answer_key", "category_key", "match")
        if self.task == "stories":
            self._refuse_others("gsm8k, aime or jsonl", "data")
            return tasks.stories(self.category, self.limit)
        if self.data is None:
            raise UsageError(f"--task {self.task} needs --data FILE, a JSONL file")
        if self.task == "gsm8k":
            task = tasks.gsm8k(self.data)
        elif self.task == "aime":
            task = tasks.aime(self.data)
        else:
            task = tasks.jsonl(self.data, self._keys())
        return replace(task, items=tasks.select(task.items, self.category, self.limit))

    def _keys(self) -> JsonlKeys:
        from trueline.evaluate import tasks

        return tasks.JsonlKeys(
            prompt=self.prompt_key or "prompt",
            answer=self.answer_key or "answer",
            category=self.category_key,
            matches=self.match or ("exact",),
        )

    def _refuse_others(self, tasks: str, *names: str) -> None:
        for name in names:
            if getattr(self, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --task {tasks}, not for {self.task}"
                )


@Parameter(name="*", group="Prompts")
@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """How it is asked."""

    chat: Annotated[bool | None, Parameter(negative="--no-chat")] = None
    """Ask through the model's chat template, or as one text to continue. Default: chat where the
    model has a template and there are no examples."""
    fewshot_data: Path | None = None
    """Of gsm8k: a file of the same form whose first items are shown, solved, before each
    question."""
    num_fewshot: int | None = None
    """How many of them (5)."""
    instruction: str | None = None
    """After the question, where there are no examples. Default: the task's, which says how the
    answer is to be written; '' is none."""
    system: str = ""
    """The system prompt of a chat."""
    template_kwargs: tuple[str, ...] = ()
    """For the model's chat template, as enable_thinking=false. May be given several times."""

    def format(self, task: Task, has_chat_template: bool) -> PromptFormat:
        from trueline.evaluate.prompts import PromptFormat

        examples = self._examples(task)
        if examples and self.instruction:
            raise UsageError("--instruction is for prompts without the examples of --fewshot-data")
        chat = has_chat_template and not examples if self.chat is None else self.chat
        if chat and not has_chat_template:
            raise UsageError("--chat: the model has no chat template; accepted: --no-chat")
        if not chat:
            for name in ("system", "template_kwargs"):
                if getattr(self, name):
                    raise UsageError(
                        f"--{name.replace('_', '-')} is for a chat, and this is a completion; "
                        "add --chat"
                    )
        return PromptFormat(
            chat=chat,
            examples=examples,
            instruction=task.instruction if self.instruction is None else self.instruction,
            system=self.system,
            is_question_and_answer=task.is_question_and_answer,
        )

    def _examples(self, task: Task) -> tuple[Item, ...]:
        from trueline.evaluate.tasks import few_shot_examples

        count = DEFAULT_FEWSHOT if self.num_fewshot is None else self.num_fewshot
        if self.fewshot_data is None:
            if self.num_fewshot:
                raise UsageError("--num-fewshot needs --fewshot-data FILE to take them from")
            return ()
        if task.name != "gsm8k":
            raise UsageError(f"--fewshot-data is for --task gsm8k, not for {task.name}")
        if count < 0:
            raise UsageError(f"--num-fewshot {count}: accepted: numbers from 0 up")
        return few_shot_examples(self.fewshot_data, count)

    def kwargs(self) -> JSON:
        return parse_fields("--template-kwargs", self.template_kwargs)


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSampling:
    """How tokens are drawn: greedily unless told otherwise, whatever the model's own default."""

    max_tokens: int | None = None
    """Of an output. Default: the task's (stories 256, gsm8k and jsonl 512, aime what the model's
    length leaves; of a chat on a server its own default)."""
    temperature: float = 0.0
    """0 takes the likeliest token every time."""
    top_p: float = 1.0
    """1 takes all tokens."""
    top_k: int | None = None
    """Default: as the model's generation_config.json says, or all."""
    min_p: float | None = None
    """Default: likewise, or 0."""
    seed: int = 0
    """Each sample's own seed follows from it, the item and the sample's number."""
    stop: tuple[str, ...] = ()
    """End an output at this text. May be given several times."""
    samples: int = 1
    """Outputs of each item; accuracy is then their mean."""

    def given(self) -> JSON:
        """What a user said of the parameters that are otherwise the model's."""
        said = {"top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in said.items() if value is not None}

    def params(self, task: Task, of_the_model: JSON) -> SamplingParams:
        from trueline.engine.params import SamplingParams

        always = {
            "max_tokens": task.max_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
        }
        return SamplingParams(**of_the_model | self.given() | always)
