"""Generates with the engine in this process: all requests are queued, the engine batches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trueline.errors import EngineBroken, TruelineError
from trueline.evaluate.run import EvalOutput, EvalRequest, Report
from trueline.llm import LLM
from trueline.output_processor import Prompt
from trueline.outputs import RequestOutput
from trueline.utils.gc_frozen import gc_frozen


class EngineRunner:
    def __init__(self, llm: LLM, template_kwargs: Mapping[str, object] | None = None) -> None:
        self.llm = llm
        self.template_kwargs = dict(template_kwargs or {})

    @property
    def has_chat_template(self) -> bool:
        tokenizer = self.llm.get_tokenizer()
        return tokenizer is not None and tokenizer.has_chat_form

    def run(self, requests: Sequence[EvalRequest], report: Report) -> None:
        engine = self.llm.llm_engine
        waiting: dict[str, EvalRequest] = {}
        try:
            for number, request in enumerate(requests):
                name = f"eval-{number}"
                try:
                    engine.add_request(name, self._prompt(request), request.params)
                except EngineBroken:
                    raise
                except TruelineError as error:  # too long, say
                    report(request, EvalOutput(error=str(error)))
                else:
                    waiting[name] = request
            with gc_frozen():
                while waiting:
                    for output in engine.step():
                        if output.finished and output.request_id in waiting:
                            request = waiting.pop(output.request_id)
                            report(request, _read(request, output))
        except BaseException:
            engine.drop_requests(waiting)
            raise

    def plan_lines(self) -> list[str]:
        return self.llm.llm_engine.plan_lines

    def _prompt(self, request: EvalRequest) -> Prompt:
        if isinstance(request.prompt, str):
            return request.prompt
        return self.llm.llm_engine.chat_prompt(
            request.prompt, chat_template_kwargs=self.template_kwargs
        )


def _read(request: EvalRequest, output: RequestOutput) -> EvalOutput:
    (completion,) = output.outputs
    return EvalOutput(
        text=completion.text,
        rendered_prompt=None if isinstance(request.prompt, str) else output.prompt,
        prompt_tokens=len(output.prompt_token_ids),
        generated_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason or "error",
        error=completion.error,
    )
