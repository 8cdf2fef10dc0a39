"""The built-in models as they are installed: complete, small, greedy, and able to solve the sample
problem."""

from __future__ import annotations

import pytest

from trueline import LLM, SamplingParams
from trueline.models import read_model
from trueline.tasks.stories import is_right
from trueline.utils.builtin import BUILTIN_MODELS, SAMPLE_PROBLEM, BuiltinModel

MEGABYTE = 1_000_000


def num_bytes(model: BuiltinModel) -> int:
    return sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file())


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_a_model_solves_the_sample_problem(name: str) -> None:
    model = BUILTIN_MODELS[name]
    assert read_model(model.path).family == model.family
    llm = LLM(name, max_num_seqs=1, max_model_len=256, device="cpu")
    params = SamplingParams(**llm.llm_engine.default_params, max_tokens=128)
    assert params.is_greedy
    (output,) = llm.chat([{"role": "user", "content": SAMPLE_PROBLEM}], params, use_tqdm=False)
    assert is_right("82", output.outputs[0].text), output.outputs[0].text


def test_they_are_small() -> None:
    sizes = {model.name: num_bytes(model) for model in BUILTIN_MODELS.values()}
    assert max(sizes.values()) <= 16 * MEGABYTE
    assert sum(sizes.values()) <= 90 * MEGABYTE
