"""The built-in models as they are installed: complete, small, greedy, and able to solve the sample
problem."""

from __future__ import annotations

import re

import pytest

from paths import ROOT
from trueline import LLM, SamplingParams
from trueline.cli import main
from trueline.models import read_model
from trueline.tasks.stories import is_right
from trueline.utils.builtin import BUILTIN_MODELS, SAMPLE_PROBLEM, BuiltinModel
from trueline.witness import demo

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


def test_the_demo_is_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the number of problems, of right answers, and the seconds."""
    monkeypatch.setattr(demo, "ITEMS", 12)
    with pytest.raises(SystemExit) as ended:
        main(["witness", "--demo", "--device", "cpu"])
    assert ended.value.code == 0
    counted = re.compile(r"^(\d+ more problems|the same.*): (\d+) right .*$", re.MULTILINE)
    shown, out = (ROOT / "README.md").read_text(), capsys.readouterr().out
    assert counted.sub(r"\1", out).replace("12 more", "50 more") in counted.sub(r"\1", shown)
    right, broken = (int(count) for _, count in counted.findall(out))
    assert right >= 10
    assert broken <= 2
