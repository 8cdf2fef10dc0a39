"""No full garbage collection while tokens are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trueline import LLM, SamplingParams
from trueline.bench.workload import Workload, measure
from trueline.llm import LLMEngine
from trueline.server.process.engine_process import EngineLoop
from trueline.utils import gc_frozen as pauses
from trueline.utils.gc_frozen import gc_frozen


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def frozen_at(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """At each step: whether what is old was out of sight."""
    seen: list[bool] = []
    step = LLMEngine.step

    def watched(self: LLMEngine) -> Any:
        seen.append(gc.get_freeze_count() > 1000)
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", watched)
    return seen


def test_while_it_lasts() -> None:
    with gc_frozen():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() < 1000


def test_also_when_it_fails() -> None:
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() < 1000


def test_what_somebody_froze_stays() -> None:
    gc.freeze()
    with gc_frozen():
        pass
    assert gc.get_freeze_count() > 1000


@pytest.mark.parametrize(("count", "ours"), [(0, True), (375, True), (5000, False)])
def test_the_interpreter_keeps_some_out_of_sight(
    count: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython 3.12 does, from its start: nobody has asked for that."""
    done: list[str] = []
    fake = SimpleNamespace(
        get_freeze_count=lambda: count,
        freeze=lambda: done.append("freeze"),
        unfreeze=lambda: done.append("unfreeze"),
    )
    monkeypatch.setattr(pauses, "gc", fake)
    with gc_frozen():
        assert done == ["freeze"] * ours
    assert done == ["freeze", "unfreeze"] * ours


def test_generating(tiny: Any, frozen_at: list[bool]) -> None:
    llm = LLM(tiny("deepseek_v3"), max_model_len=64)
    llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
    assert frozen_at
    assert all(frozen_at)
    assert gc.get_freeze_count() < 1000
    frozen_at.clear()
    measure(llm.llm_engine, Workload(1, 8, 3))
    assert frozen_at
    assert all(frozen_at)


def test_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    engine = SimpleNamespace(
        handle_messages=lambda: len(seen) < 3,
        step=lambda: seen.append(gc.get_freeze_count() > 1000),
    )
    EngineLoop.run(engine)  # type: ignore[arg-type]
    assert seen == [True] * 3
