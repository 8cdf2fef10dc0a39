"""docs/tutorial.md, run from top to bottom as a reader would, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import trueline
from paths import DOCS
from trueline.cli import app
from trueline.utils.builtin import FOLDER

PAGE = DOCS / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "8000"


def script(page: str, port: int) -> str:
    """All blocks of commands, in one shell. The server ends with it, whatever happens."""
    parts = ["set -eu -o pipefail", "trap 'kill $(jobs -p) 2> ended.txt || true' EXIT"]
    for language, text in BLOCK.findall(page):
        if language == "bash":
            parts.append(text)
        else:
            assert language == "python", f"a block of {language} is run by nobody"
            parts.append(f"python - <<'PYTHON'\n{text}PYTHON\n")
    return "\n".join(parts).replace(PORT, str(port))


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """`trueline` and `python` of this environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, more in (("python", ""), ("trueline", " -m trueline")):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}"{more} "$@"\n')
        file.chmod(0o755)
    return folder


@pytest.mark.slow
def test_every_command_runs(commands: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = PAGE.read_text()
    at = tmp_path / "work"
    at.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(trueline.__file__).parents[1]),
    }
    done = subprocess.run(
        ["bash", "-c", script(page, port)], cwd=at, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "3 + 4 = 7\n#### 7" in done.stdout
    assert "10 logprobs agree" in done.stdout
    assert "vocab_sise" in done.stdout + done.stderr
    assert "softmax_scale" in done.stdout
    assert "trueline" in done.stdout.split("first token")[-1]


def test_commands_are_known_and_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what asks a server is only parsed."""
    monkeypatch.chdir(tmp_path)
    verbs = set()
    for language, text in BLOCK.findall(PAGE.read_text()):
        for line in text.splitlines() if language == "bash" else ():
            command, *words = shlex.split(line.removeprefix("! ").removesuffix(" &"))
            if command == "trueline":
                app.parse_args(words, exit_on_error=False, print_error=False)
                verbs.add(words[0])
                if words[0] == "make-tiny":
                    app(words, exit_on_error=False, result_action="return_value")
        runs = "openai" not in text and (FOLDER.is_dir() or "LLM()" not in text)
        if language == "python" and runs:
            exec(text, {})
    assert verbs >= set("make-tiny inspect generate score serve complete chat witness".split())
    assert "10 logprobs agree" in capsys.readouterr().out


def test_a_command_that_fails_is_seen(commands: Path, tmp_path: Path) -> None:
    page = "```bash\nfalse\n```\n```bash\ntrue\n```\n"
    done = subprocess.run(["bash", "-c", script(page, 1)], cwd=tmp_path, capture_output=True)
    assert done.returncode != 0
