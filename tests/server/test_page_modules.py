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


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_is_expensive(evaluate: Evaluate, name: str) -> None:
    """A million characters take a second or two; with their square, the minute would be over."""
    function = f"(blocks, inline) => ({READ_ALL})(blocks, inline, {HOSTILE[name]})"
    assert evaluate(function, "markdown", "inline", argument=None) >= 0
