"""The chat page's own JavaScript, by node. tests/browser asks a browser the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trueline.server.chat_page
from page_cases import BLOCKS, HOSTILE, INLINE, READ_ALL

PAGE = Path(trueline.server.chat_page.__file__).parent / "page"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None, reason="no node here: tests/browser runs the same in a browser"
)
Evaluate = Callable[..., Any]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """evaluate("code of a function", modules…, argument=…) -> what it returns."""
    folder = tmp_path_factory.mktemp("page")
    for file in PAGE.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')

    def call(function: str, *modules: str, argument: Any) -> Any:
        imports = [f"await import('{folder}/{name}.js')" for name in modules]
        given = ", ".join([*imports, json.dumps(argument)])
        code = f"process.stdout.write(JSON.stringify(await ({function})({given})))"
        assert NODE is not None
        command = [NODE, "--input-type=module", "-"]
        found = subprocess.run(command, input=code, capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return call


def test_inline(evaluate: Evaluate) -> None:
    texts = [text for text, _ in INLINE]
    found = evaluate("(m, texts) => texts.map(m.parseInline)", "inline", argument=texts)
    for (text, wanted), parts in zip(INLINE, found, strict=True):
        assert parts == wanted, text


def test_blocks(evaluate: Evaluate) -> None:
    texts = [text for text, _ in BLOCKS]
    function = "(m, texts) => texts.map((text) => m.parseBlocks(text))"
    found = evaluate(function, "markdown", argument=texts)
    for (text, wanted), blocks in zip(BLOCKS, found, strict=True):
        assert blocks == wanted, text


SHARES = [
    # a token among its candidates, and one that is not
    ({"text": "a", "logprob": -0.6931, "rank": 2, "at": 1, "top": [[" ", -0.7765], ["a", -0.6931]]},
     [["␣", "46.0 %", False, 1], ["a", "50.0 %", True, 2], ["all others", "4.0 %", False, None]]),
    ({"text": "\n", "logprob": -9.2, "rank": 812, "at": -1, "top": [["", -0.0001]]},
     [["∅", "100 %", False, 1], ["↵", "< 0.1 %", True, 812]]),
    ({"text": "x", "logprob": 0.0, "rank": 1, "at": 0, "top": [["x", 0.0]]},
     [["x", "100 %", True, 1]]),
    ({"text": "x", "logprob": -9999.0, "rank": 5, "at": -1, "top": []},
     [["x", "0.0 %", True, 5], ["all others", "100 %", False, None]]),
]  # fmt: skip


def test_candidates_of_a_token(evaluate: Evaluate) -> None:
    function = """(m, tokens) => tokens.map((token) => m.candidates(token)
      .map(({name, share, drawn, rank}) => [name, m.percent(share), drawn, rank]))"""
    found = evaluate(function, "tokens", argument=[token for token, _ in SHARES])
    assert found == [rows for _, rows in SHARES]


def test_tokens_of_a_stream(evaluate: Evaluate) -> None:
    """Tokens may have one text, and be others."""
    top = [{"token": "\ufffd", "logprob": -0.1, "bytes": [240]},
           {"token": "\ufffd", "logprob": -3, "bytes": [241]}]  # fmt: skip
    entries = [
        {"token": "\ufffd", "logprob": -3, "rank": 2, "bytes": [241], "top_logprobs": top},
        {"token": "b", "logprob": -9, "rank": 40, "bytes": [98], "top_logprobs": top},
        {"token": "c", "logprob": -1, "rank": 1, "bytes": [99]},
    ]
    function = "(m, all) => all.map((one) => m.tokensOf(one))"
    found = evaluate(function, "tokens", argument=[{"content": entries}, {"content": None}, None])
    assert [token["at"] for token in found[0]] == [1, -1, -1]
    assert [token["rank"] for token in found[0]] == [2, 40, 1]
    assert found[1:] == [[], []]


def test_how_sure_is_in_five_steps(evaluate: Evaluate) -> None:
    function = "(m, shares) => shares.map((share) => m.level(Math.log(share)))"
    shares = [1, 0.901, 0.899, 0.61, 0.59, 0.31, 0.29, 0.11, 0.09, 1e-9]
    found = evaluate(function, "tokens", argument=shares)
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_nothing_in_a_token_is_unseen(evaluate: Evaluate) -> None:
    texts = {"": "∅", " a": "␣a", "\n\t": "↵⇥", "\x00\x7f": "\\u0000\\u007f",
             "\u202e\u2066": "\\u202e\\u2066", "é\ufeff": "é\\ufeff", "<b>": "<b>"}  # fmt: skip
    found = evaluate("(m, all) => all.map(m.visible)", "tokens", argument=[*texts])
    assert found == [*texts.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_is_expensive(evaluate: Evaluate, name: str) -> None:
    """A million characters take a second or two; with their square, the minute would be over."""
    function = f"(blocks, inline) => ({READ_ALL})(blocks, inline, {HOSTILE[name]})"
    assert evaluate(function, "markdown", "inline", argument=None) >= 0
