"""The probe behind batch_invariant=True sees every way in which a GEMM's bits can depend on what
else is computed with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.ops.capabilities import Context
from trueline.ops.registry import implementation
from trueline.plan import select
from trueline.plan.select import choose_op, is_batch_invariant

TINY = 1e-6


def steady(x: Tensor, weight: Tensor) -> Tensor:
    """One row at a time."""
    return torch.stack([weight @ row for row in x])


def by_count(y: Tensor) -> Tensor:
    return y + TINY * len(y)


def many_rows(y: Tensor) -> Tensor:
    """From 200 rows on, as where another kernel takes over."""
    return y + TINY * (len(y) >= 200)


def last_rows(y: Tensor) -> Tensor:
    """What is left after blocks of four takes another way, as in vectorised kernels."""
    y = y.clone()
    y[len(y) // 4 * 4 :] += TINY
    return y


def last_row_of_two(y: Tensor) -> Tensor:
    y = y.clone()
    y[1:2] += TINY * (len(y) == 2)
    return y


def odd_columns(y: Tensor) -> Tensor:
    """Only where the width leaves a remainder."""
    return y if y.shape[1] % 8 == 0 else by_count(y)


def one_column(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, -1] += TINY * len(y)
    return y


def made(change: Callable[[Tensor], Tensor]) -> type:
    class Linear:
        pack = staticmethod(lambda weight: weight)
        run = staticmethod(lambda x, weight: change(steady(x, weight)))

    return Linear


def test_a_steady_one_passes() -> None:
    assert is_batch_invariant(made(lambda y: y), torch.float32)


@pytest.mark.parametrize(
    "change",
    [by_count, many_rows, last_rows, last_row_of_two, odd_columns, one_column],
    ids=lambda change: change.__name__,
)
def test_dependence_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    assert not is_batch_invariant(made(change), torch.float32)


def test_a_plan_probes_what_it_has_not_probed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process, and again where a function is another."""
    config = EngineConfig(batch_invariant=True)
    context = Context(dtype=torch.float32, batch_invariant=True)
    first = choose_op("linear", config, context)
    monkeypatch.setattr(select, "is_batch_invariant", None)  # not asked again
    assert choose_op("linear", config, context) == first
    monkeypatch.undo()
    linear = implementation("linear", first.name)
    run = linear.run
    monkeypatch.setattr(linear, "run", lambda x, packed: by_count(run(x, packed)))
    second = choose_op("linear", config, context)
    assert second.name != first.name
    assert f"not {first.name}: a row's bits depend on the number of rows" in second.reason
