"""The clients that applications are written with, each as its documentation says and in an
environment of its own: they need versions of the same packages that exclude each other. What is
installed stands in programs/*.txt, exactly, and is made once (helpers/environments.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizers import TEMPLATE, VOCAB
from environments import node_modules, python_with
from offered_tools import calling_tokenizer
from servers import serving

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
NODE = ("openai@7.55.0",)
SECONDS = 300.0
FLAGS = ("--tool-call-parser", "deepseek_v31", "--reasoning-parser", "deepseek_r1",
         "--served-model-name", "tiny", "--max-model-len", "4096")  # fmt: skip
QUIET = TEMPLATE.replace("is not defined or", "is defined and")
"""Thinks only where it is asked to."""


@pytest.fixture(scope="module")
def asked(
    tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """What the programs are told: where the server is, and what it says without a client."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    calling_tokenizer(tokenizer, "deepseek_v31", template=QUIET)
    model = tiny("deepseek_v3", keys={"vocab_size": VOCAB})
    with serving(model, "--tokenizer", str(tokenizer), *FLAGS) as served:

        def message(**fields: Any) -> dict[str, str]:
            body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            answer = served.post("/v1/chat/completions", json=body | fields)
            assert answer.is_success, answer.text
            found: dict[str, str] = answer.json()["choices"][0]["message"]
            return found

        switch = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8}
        thought = message(max_tokens=24, **switch)
        yield {
            "url": f"{served.url}/v1", "model": "tiny", "text": message(max_tokens=12)["content"],
            "reasoning": thought["reasoning_content"], "after": thought["content"],
        }  # fmt: skip


def outcomes(command: Sequence[str | Path], asked: dict[str, str], at: Path) -> dict[str, Any]:
    """None of each case that went as expected, else what was wrong."""
    done = subprocess.run(
        [*command, json.dumps(asked)], capture_output=True, text=True, timeout=SECONDS, cwd=at
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("OUTCOMES ")]
    assert told, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(told[0].removeprefix("OUTCOMES "))
    return found


def check(found: dict[str, Any]) -> None:
    assert len(found) > 4
    wrong = {name: text for name, text in found.items() if text is not None}
    assert not wrong, "\n".join(f"-- {name}\n{text}" for name, text in wrong.items())


@pytest.mark.parametrize(
    ("program", "requirements"),
    [
        ("with_openai.py", "official.txt"),
        ("with_anthropic.py", "anthropic.txt"),
        ("with_langchain.py", "official.txt"),
        ("with_pydantic_ai.py", "official.txt"),
        ("with_instructor.py", "instructor.txt"),
        ("with_litellm.py", "litellm.txt"),
    ],
)
def test_python(program: str, requirements: str, asked: dict[str, str], tmp_path: Path) -> None:
    listed = PROGRAMS / requirements
    python = python_with(listed.stem, listed.read_text().split(), made_from=[listed])
    check(outcomes([python, PROGRAMS / program], asked, tmp_path))


def test_node(asked: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node: apt-get install nodejs npm")
    # its modules are looked for beside a program
    (tmp_path / "node_modules").symlink_to(node_modules("node", NODE))
    program = shutil.copy(PROGRAMS / "with_openai.mjs", tmp_path)
    check(outcomes(["node", program], asked, tmp_path))
