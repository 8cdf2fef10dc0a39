"""Tab in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from terminals import Terminal, on_a_terminal
from trueline.cli.arguments import model_or_default
from trueline.utils.hub import cached_models, find_model

Run = Callable[..., tuple[int, str, str]]
CACHED = "models--org--a-b"


@pytest.fixture
def shell_env(tmp_path: Path, run: Run) -> dict[str, str]:
    """A home with the scripts, `trueline` on the path, a model here and one in the hub's cache."""
    command = tmp_path / "bin" / "trueline"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m trueline "$@"\n')
    command.chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").touch()
    (tmp_path / "hub" / CACHED / "snapshots" / "abc").mkdir(parents=True)
    for shell in ("bash", "zsh", "fish"):
        code, script, _ = run("completion", shell)
        assert code == 0
        (tmp_path / f"script.{shell}").write_text(script)
    return {
        **os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PS1": "$ ",
        "TERM": "dumb", "PATH": f"{command.parent}:{os.environ['PATH']}",
        "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip


LINES = {
    "trueline ser": "trueline serve",
    "trueline bench thr": "trueline bench throughput",
    "trueline serve --max-model": "trueline serve --max-model-len",
    "trueline serve --log-format j": "trueline serve --log-format json",
    "trueline serve witness-li": "trueline serve witness-ling",
    "trueline chat org/": "trueline chat org/a-b",
    "trueline verify he": "trueline verify here",
    "trueline serve --config scr": "trueline serve --config script.",
}


def completed(terminal: Terminal, line: str) -> str:
    """The line after Tab: it is made an argument of echo, and entered."""
    terminal.send(f"{line}\t\x01echo :\n")
    terminal.wait_for("\r\n:")
    return terminal.wait_for("\r\n").rstrip()


def test_bash(shell_env: Mapping[str, str], tmp_path: Path) -> None:
    with on_a_terminal(["bash", "--norc", "--noprofile", "-i"], shell_env) as terminal:
        terminal.send(f"cd {tmp_path}; . ./script.bash; echo rea''dy\n")
        terminal.wait_for("ready\r\n")
        for line, wanted in LINES.items():
            assert completed(terminal, line) == wanted
        path = completed(terminal, "trueline inspect bi")
        assert path == "trueline inspect bin/"  # no model


def test_zsh(shell_env: Mapping[str, str], tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh: apt-get install zsh")
    with on_a_terminal(["zsh", "-f", "-i"], shell_env) as terminal:
        terminal.send(f"cd {tmp_path}; autoload -U compinit; compinit -u -D; . ./script.zsh\n")
        terminal.send("bindkey -e; zstyle ':completion:*' insert-tab false; echo rea''dy\n")
        terminal.wait_for("ready\r\n")
        for line, wanted in LINES.items():
            assert completed(terminal, line) == wanted
        assert completed(terminal, "trueline inspect bi") == "trueline inspect bin"  # less its /


def test_fish(shell_env: Mapping[str, str], tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish: apt-get install fish")
    for line, wanted in LINES.items():
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'"],
            capture_output=True, text=True, check=True, env=dict(shell_env), cwd=tmp_path,
        )  # fmt: skip
        found = [row.partition("\t")[0] for row in done.stdout.splitlines()]
        assert found
        assert all(word.startswith(wanted.split()[-1]) for word in found), line


def test_what_is_completed_is_found(
    shell_env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", shell_env["HF_HUB_CACHE"])
    assert cached_models() == ["org/a-b"]
    assert find_model("org/a-b").name == "abc"
    assert model_or_default("org/a-b") == "org/a-b"
