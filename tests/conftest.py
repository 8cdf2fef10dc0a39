"""Fixtures every test may use. One torch thread per worker, as two workers share two cores;
`make test-cpus` asks for others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import budget
from trueline.cli import main
from trueline.tiny.configs import change_config, family_config
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.weights.formats import Storage

# No test asks a hub, except one of its own (hub_stub.py). Before anything imports huggingface_hub.
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
if not torch.cuda.is_available():  # before anything imports Triton
    import interpreter  # noqa: F401

settings.register_profile(
    "default",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "full", max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

TinyMaker = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(budget)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as a shell's background jobs have it, and all their children: tests interrupt theirs
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyMaker:
    """tiny(family, seed=…, dtype=…, storage=…, yarn=…, keys={…}) -> model directory, made once."""
    made: dict[str, Path] = {}

    def make(
        family: str,
        *,
        keys: Mapping[str, Any] | None = None,
        yarn: bool | None = None,
        storage: Storage | None = None,
        dtype: str = "float32",
        **options: Any,
    ) -> Path:
        identity = repr((family, sorted((keys or {}).items()), yarn, storage, dtype, options))
        if identity not in made:
            config = family_config(family)
            changed = {**(keys or {}), "torch_dtype": dtype}
            change_config(config, changed, yarn=yarn, storage=storage)
            directory = tmp_path_factory.mktemp("tiny") / family
            make_checkpoint(directory, config, TinyOptions(dtype=dtype, **options))
            made[identity] = directory
        return made[identity]

    return make


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[Mapping[str, Any]], Path]:
    def write(config: Mapping[str, Any]) -> Path:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        return file

    return write


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """Tiny models that transformers itself made, by case, each made once."""
    import hf  # here, because importing transformers takes seconds

    @cache
    def make(case: hf.Case) -> hf.Checkpoint:
        return hf.make(case, tmp_path_factory.mktemp("model") / str(case))

    return make


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(arguments…) -> exit code, stdout, stderr of the command line."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
