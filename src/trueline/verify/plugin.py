"""A pytest plug-in: the checks of `trueline verify` on a model, and those that a replacement of an
op or a layer must pass, as tests of your own run.

    pytest -p trueline.verify.plugin --model DIR
    pytest -p trueline.verify.plugin --op lightning=example --layer lightning=counting

Without files or folders on the command line these are all that runs."""

from __future__ import annotations

from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("as_tests.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trueline", "Trueline: what to check")

    def several(name: str, metavar: str, words: str) -> None:
        group.addoption(name, action="append", default=[], metavar=metavar, help=words)

    several("--model", "MODEL", "a model to check as trueline verify does: a directory, a built-in "
            "model, or a hub id; may be given several times")  # fmt: skip
    several("--op", "OP=NAME", "an implementation of an op to check, as lightning=example; may be "
            "given several times")  # fmt: skip
    several("--layer", "KIND=NAME", "a layer to check, as lightning=counting; may be given several "
            "times")  # fmt: skip
    several("--option", "NAME=VALUE", "an option of the engine for --model, as dtype=bfloat16; may "
            "be given several times")  # fmt: skip
    group.addoption("--tier", choices=("smoke", "standard", "full"), default="standard",
                    help="how much of a model is checked")  # fmt: skip
    group.addoption("--replay-dir", type=Path, metavar="DIR",
                    help="write a file for trueline replay of each check that fails")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if not any(config.getoption(name) for name in ("--model", "--op", "--layer")):
        return
    given = config.args_source == pytest.Config.ArgsSource.ARGS
    config.args = [*config.args, str(CHECKS)] if given else [str(CHECKS)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kinds of checks that nothing was asked for have no tests."""
    items[:] = [item for item in items if not (item.path == CHECKS and "[NOTSET]" in item.name)]
