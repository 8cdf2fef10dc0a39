"""What a replacement of an op or a layer must pass, for whoever wrote it. pytest runs it:

    python -m trueline.conformance --op lightning=example
    pytest -p trueline.conformance --pyargs trueline.conformance --layer lightning=example

This file is the pytest plug-in that has the options; the checks are those of `trueline.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trueline", "Trueline: which replacements to check")
    group.addoption(
        "--op",
        action="append",
        default=[],
        metavar="OP=NAME",
        help="an implementation of an op, as lightning=example; may be given several times",
    )
    group.addoption(
        "--layer",
        action="append",
        default=[],
        metavar="KIND=NAME",
        help="a layer, as lightning=counting; may be given several times",
    )
