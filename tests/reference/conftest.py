"""Fixtures of the tests of the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hf_v4 import V4Case, V4Checkpoint


@pytest.fixture(scope="session")
def v4_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[V4Case], V4Checkpoint]:
    """Tiny DeepSeek V4 models that transformers itself made, by case, each made once."""
    import hf_v4  # here, because importing transformers takes seconds

    @cache
    def make(case: V4Case) -> V4Checkpoint:
        return hf_v4.make(case, tmp_path_factory.mktemp("v4") / case.name)

    return make
