"""Verbs without a model, and built-in models by name: here with random weights in their place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline import LLM, SamplingParams
from trueline.engine.params import default_params
from trueline.errors import UsageError
from trueline.utils import builtin
from trueline.utils.builtin import BUILTIN_MODELS, DEFAULT_MODEL, SAMPLE_PROBLEM
from trueline.utils.hub import find_model

Tiny = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where built-in models are installed."""
    monkeypatch.setattr(builtin, "FOLDER", tmp_path / "models")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / DEFAULT_MODEL).symlink_to(tiny("deepseek_v3"))
    return tmp_path / "models"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("score",),
        ("score", "--tokens", "1,2"),
        ("serve", "--dry-run"),
        ("generate", "--max-tokens", "2"),
    ],
)
def test_a_verb_without_a_model_takes_the_default_and_says_so(
    arguments: tuple[str, ...], run: Run, folder: Path
) -> None:
    code, out, err = run(*arguments)
    assert code == 0
    assert out
    assert err.startswith(f"no model given: the built-in {DEFAULT_MODEL}, a small DeepSeek-V3")
    verb, *flags = arguments
    assert "no model given" not in run(verb, DEFAULT_MODEL, *flags)[2]


def test_the_name_is_the_built_in_model_and_a_path_the_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / DEFAULT_MODEL).mkdir(parents=True)
    monkeypatch.chdir(here)
    assert find_model(DEFAULT_MODEL) == folder / DEFAULT_MODEL
    for directory in (f"./{DEFAULT_MODEL}", f"{DEFAULT_MODEL}/", Path(DEFAULT_MODEL)):
        assert find_model(directory) == Path(DEFAULT_MODEL)


def test_errors_name_the_built_in_models(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"\(witness-v3, .*the nearest known name is 'witness-v3"):
        find_model("witnes-v3")
    missing = next(name for name in BUILTIN_MODELS if name != DEFAULT_MODEL)
    with pytest.raises(UsageError, match="files are not installed"):
        find_model(missing)


def test_a_built_in_model_is_asked_as_a_chat(run: Run, folder: Path) -> None:
    def prompt(*flags: str | Path) -> str:
        _, out, _ = run("generate", *flags, "--max-tokens", "1", "--json", "--quiet")
        return str(json.loads(out)["prompt"])

    assert prompt() == f"<|begin|><|user|>{SAMPLE_PROBLEM}<|end|><|assistant|>"
    assert prompt("--prompt", "hi") == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert prompt("--prompt", "hi", "--no-chat") == "hi"
    assert prompt(folder / DEFAULT_MODEL, "--prompt", "hi") == "hi"
    out = run("generate", "--prompt", "hi", "--max-tokens", "1", "--quiet")[1]
    assert out.startswith("> hi\n")


def test_the_sampling_that_a_model_recommends(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny("deepseek_v3").iterdir():
        (model / file.name).symlink_to(file)
    recommended = {"do_sample": False, "temperature": 0.6, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(recommended))

    def ids(*flags: str) -> list[int]:
        _, out, _ = run("generate", model, "--prompt", "x", "--json", "--ignore-eos", *flags)
        return list(json.loads(out)["outputs"][0]["token_ids"])

    greedy = ids("--temperature", "0", "--max-tokens", "5")
    assert ids("--max-tokens", "5") == greedy
    assert ids("--temperature", "2", "--seed", "1", "--max-tokens", "5") != greedy
    llm = LLM(model, max_model_len=32)
    (output,) = llm.generate("x")
    assert output.outputs[0].token_ids[:5] == greedy


def test_python_without_a_model_takes_the_default(folder: Path) -> None:
    (output,) = LLM(max_model_len=64).chat(
        [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2)
    )
    assert len(output.outputs[0].token_ids) == 2


def test_help_names_no_empty_defaults(run: Run) -> None:
    _, out, _ = run("generate", "--help")
    assert "[default: auto]" in out
    assert "[default: 1]" in " ".join(out.replace("│", " ").split())
    assert "False" not in out
    assert "()" not in out


def test_what_a_model_recommends_is_checked() -> None:
    assert default_params({"temperature": 0.6, "top_p": 0.95, "top_k": None, "other": 1}) == {
        "temperature": 0.6,
        "top_p": 0.95,
    }
    assert default_params({"do_sample": True, "temperature": 0, "top_k": -1}) == {
        "temperature": 0,
        "top_k": -1,
    }
    for key, value in (
        ("top_p", 2),
        ("temperature", float("nan")),
        ("temperature", "0.6"),
        ("top_k", 50.0),
        ("do_sample", "false"),
        ("do_sample", 0),
    ):
        with pytest.raises(UsageError, match=rf"generation_config\.json: {key} = .*: accepted: "):
            default_params({key: value})
