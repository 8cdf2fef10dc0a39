"""Captured steps draw by themselves only where nothing but a temperature decides. Here each
parameter of a request goes through the runner's captured path, the layers run as they always do,
and every answer is the eager one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueline import LLM, SamplingParams
from trueline.engine.batch import Batch
from trueline.engine.graphs import DecodeGraphs, GraphKey, GraphOutputs
from trueline.engine.runner import Runner
from trueline.grammar.structured import StructuredOutputsParams
from trueline.ops.sampling import SamplingState, triton
from trueline.outputs import RequestOutput

Tiny = Callable[..., Path]


class Emulated(DecodeGraphs):
    """What a graph tells its kernels and what they draw; its layers are not replayed."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.inputs, self.num_plain = runner, runner.inputs, 0

    def run(
        self, batch: Batch, rows: Sequence[SamplingState], places: Mapping[str, int]
    ) -> GraphOutputs:
        hidden = self.runner._forward(batch)
        logits = self.runner.decoder.logits(hidden)
        told = self._values(batch, rows, places)
        given = (
            torch.tensor(told["temperature"], dtype=torch.float64),
            torch.tensor(told["seed"]),
            torch.tensor(told["next_position"]),
        )
        tokens, bad = triton.draw(logits, *given)
        self.runner.drawn[: len(tokens)] = tokens
        self.num_plain += all(row.is_plain for row in rows)
        return GraphOutputs(
            hidden, logits, self.runner.drawn[: len(tokens)], bad, GraphKey(len(rows), 1, 64)
        )


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(
        tiny("deepseek_v3", keys={"num_hidden_layers": 2}), max_model_len=64, max_num_seqs=4,
        num_gpu_blocks_override=64, batch_invariant=True, overlap=True, enable_prefix_caching=False,
    )  # fmt: skip


def answers(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": [5 + 3 * i, 9, 40 + i]} for i in range(len(params))]
    return [_unnamed(output) for output in llm.generate(prompts, params)]


def _unnamed(output: RequestOutput) -> RequestOutput:
    """Without its id, which an error tells too."""
    outputs = [
        replace(each, error=each.error and re.sub(r"request '\d+'", "request", each.error))
        for each in output.outputs
    ]
    return replace(output, request_id="", outputs=outputs)


def test_nothing_left_to_draw_is_the_same_error_captured(llm: LLM) -> None:
    """In a decode step: where it is known before, the request is not admitted."""
    form = StructuredOutputsParams(choice=["abc"])
    fields = BASE | {"structured_outputs": form, "bad_words": ["b", "bc"]}
    (one,) = answers(llm, [SamplingParams(**fields)])
    assert "after 1 tokens" in (one.outputs[0].error or "")
    assert captured(llm, [SamplingParams(**fields)])[0] == [one]


def captured(llm: LLM, params: list[SamplingParams]) -> tuple[list[RequestOutput], int]:
    runner = llm.llm_engine.core.executor.runner
    graphs = runner.graphs = Emulated(runner)
    try:
        return answers(llm, params), graphs.num_plain
    finally:
        runner.graphs = None


MATTERS: dict[str, Any] = {
    "temperature": 3.0,
    "top_p": 0.05,
    "top_k": 1,
    "min_p": 0.9,
    "repetition_penalty": 0.01,
    "presence_penalty": -2.0,
    "frequency_penalty": -2.0,
    "logit_bias": {77: 30.0},
    "seed": 9,
    "min_tokens": 4,
    "logprobs": 2,
    "bad_words": [chr(c) for c in range(33, 127)],
    "allowed_token_ids": [30, 31, 32, 150],  # the last one is no bad word
    "structured_outputs": StructuredOutputsParams(regex="[0-9]+"),
}
"""A value of each that changes what is drawn or told."""
BASE: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 6, "ignore_eos": True}
BESIDE: dict[str, Any] = {
    "min_tokens": {"stop_token_ids": list(range(0, 311, 2))},
    "presence_penalty": {"max_tokens": 40},
    "frequency_penalty": {"max_tokens": 40},
}
"""What one has no meaning without."""
ELSEWHERE: dict[str, Any] = {
    "n": 2,
    "stop": ["e"],
    "stop_token_ids": list(range(1, 311, 2)),
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "max_tokens": 5,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
}
"""Those of which the draw knows nothing."""


def test_every_parameter_is_here() -> None:
    assert {*MATTERS, *ELSEWHERE} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", [*MATTERS, *ELSEWHERE])
def test_each_parameter_means_the_same_captured(name: str, llm: LLM) -> None:
    """Beside plain rows that a graph could draw for."""
    base = BASE | BESIDE.get(name, {})
    own = SamplingParams(**base | {name: (MATTERS | ELSEWHERE)[name]})
    plain = SamplingParams(**base)
    params = [own, plain]
    assert captured(llm, params)[0] == answers(llm, params)
    if name in MATTERS:
        assert answers(llm, [own]) != answers(llm, [plain]), "the value changes nothing"


def test_plain_rows_are_drawn_by_the_graph(llm: LLM) -> None:
    """All steps but the first, which is the prompt's."""
    params = [SamplingParams(temperature=t, seed=7, max_tokens=6, ignore_eos=True)
              for t in (0.0, 1.0)]  # fmt: skip
    outputs, plain = captured(llm, params)
    assert outputs == answers(llm, params)
    assert plain == 5


@st.composite
def drawn_params(draw: Any) -> SamplingParams:
    chosen = draw(st.sets(st.sampled_from([*MATTERS, *ELSEWHERE]), max_size=4))
    fields = BASE | {"seed": draw(st.integers(0, 99))}
    return SamplingParams(**fields | {name: (MATTERS | ELSEWHERE)[name] for name in chosen})


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(params=st.lists(drawn_params(), min_size=1, max_size=3))
def test_any_mixture_means_the_same_captured(llm: LLM, params: list[SamplingParams]) -> None:
    assert captured(llm, params)[0] == answers(llm, params)
