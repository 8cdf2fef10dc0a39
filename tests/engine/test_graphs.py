"""Captured decode steps: the fixed buffers they read, and what padding may not do."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trueline import device
from trueline.cache.kinds.lightning import RecurrentInputs
from trueline.engine.graphs import CELLS, COLUMNS, FEW, FixedTable, InputBuffers, capture_sizes
from trueline.engine.inputs import Inputs
from trueline.engine.runner import Runner
from trueline.verify.failed import CheckFailed
from trueline.verify.faults.gpu import GPU_FAULTS
from trueline.verify.graphs import heads_are_padded


@pytest.mark.parametrize("heads", [1, 4, 8, 15])
def test_unpadded_heads_are_seen(heads: int) -> None:
    """Story 5: split metadata sized from the heads there are, at each count that it hit."""
    heads_are_padded(heads)
    (fault,) = (fault for fault in GPU_FAULTS if fault.id == "split-unpadded-heads")
    with fault.seeded(), pytest.raises(CheckFailed):
        heads_are_padded(heads)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 63, 64, 100, 256, 1000])
def test_every_batch_has_a_graph_at_most_a_third_larger(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size <= rows * 4 / 3 or size - rows <= 7


def drawn(draw: random.Random, dtype: torch.dtype, padding: int) -> float:
    """A value of a row that no padded row has."""
    value = draw.randrange(1, 1 << 20)
    return value + 0.5 if dtype.is_floating_point else value + padding


@pytest.mark.parametrize("seed", range(4))
def test_rows_and_padding_of_every_step(seed: int) -> None:
    """Batches that grow and shrink over every threshold, a random part of their rows unchanged,
    others as they were some steps ago; every field has a value of its own in every row, and padding
    has none of them. What a step does not give is what padding has. The copy of the step before may
    still be under way: nothing is written where that one was."""
    draw, most, width = random.Random(seed), 2 * FEW + 5, 4
    cpu, columns = torch.device("cpu"), COLUMNS | {"cells.0": CELLS, "cells.1": CELLS}
    columns |= {f"lightning.{name}": column for name, column in RecurrentInputs.columns.items()}
    tables = [FixedTable(most, each, cpu) for each in (width, width + 1)]
    fixed = InputBuffers(columns, most, tables, cpu)
    sizes = [0, 1, FEW - 1, FEW, FEW + 1, 2 * FEW, most - 1, most]
    pool = [[[3 * i + j] * (1 + (i + j // 2) % width) for j in (1, 2, 3)] for i in range(most)]
    rows = [draw.choice(each) for each in pool]
    hosts, under_way = [*fixed._hosts, *(h for each in tables for h in each.hosts)], set()
    for turn in range(60):
        count = draw.choice(sizes)
        several = draw.sample(range(most), draw.choice([0, 1, FEW - 1, FEW, FEW + 1, most]))
        for row in several:
            rows[row] = draw.choice(pool[row])
        blocks = rows[:count]
        given = {
            name: [drawn(draw, *field) for _ in range(count)]
            for name, field in columns.items()
            if draw.random() < 0.9
        }
        before = [host.clone() for host in hosts]
        both = [list(ids) for ids in blocks], [[*ids, 1 + turn % 7] for ids in blocks]
        fixed.fill(given, count, both)
        written = {i for i, host in enumerate(hosts) if not torch.equal(host, before[i])}
        assert not written & under_way, f"turn {turn}"
        under_way = written
        for table, rows_of in zip(tables, both, strict=True):
            for row, ids in enumerate(rows_of):
                assert table.table[row, : len(ids)].tolist() == ids, f"turn {turn}, row {row}"
        for name, (dtype, padding) in columns.items():
            field = fixed.columns[name]
            assert field.dtype == dtype
            assert field[:count].tolist() == given.get(name, [padding] * count), name
            assert field[count:].tolist() == [padding] * (most - count), name


@pytest.mark.parametrize(
    ("longest", "limits"), [(4, [4]), (5, [5]), (6, [5, 6]), (9, [5, 9]), (20, [5, 9, 20])]
)
def test_limits_of_all_kinds_in_order(longest: int, limits: list[int]) -> None:
    """Each once, the shortest first; the last is the longest sequence, and none is beyond it."""
    inputs: Any = object.__new__(Inputs)
    inputs.plan = SimpleNamespace(max_model_len=longest)
    inputs.kinds = {
        str(i): SimpleNamespace(limits=each) for i, each in enumerate([(9, 5), (), (5,)])
    }
    assert inputs.limits == limits


@pytest.mark.parametrize(
    ("recorded", "forced", "free"),
    [(None, None, True), ([], None, False), (None, [], False), ([], [], False)],
)
def test_recorded_and_forced_steps_are_not_captured(
    recorded: list[Any] | None, forced: list[Any] | None, free: bool
) -> None:
    """What layers choose passes through the host then."""
    runner: Any = object.__new__(Runner)
    runner.recorded, runner.forced = recorded, forced
    runner.plan = SimpleNamespace(limits=SimpleNamespace(num_draft_tokens=2))
    batch: Any = SimpleNamespace(tokens_per_row=1, samples=[0], tokens=[0])
    assert runner._capturable(batch) is free


class Stream:
    """Of a GPU: what waits for what, and when kernels go to it."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.told.append(f"to {self.name}")

    def __exit__(self, *error: object) -> None:
        self.told.append("to main")


@pytest.mark.parametrize("capturing", [True, False])
def test_a_branch_begins_after_what_is_before_and_ends_before_what_is_after_its_join(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps have one stream: memory that the allocator gives out again is only safe there."""
    told: list[str] = []
    main, beside = Stream("main", told), Stream("beside", told)
    monkeypatch.setattr(device, "_on_gpu", lambda: True)
    monkeypatch.setattr(device, "_second_stream", lambda _: beside)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    branch = device.Branch()
    with branch:
        told.append("inside")
    told.append("beside it")
    branch.join()
    forked = ["beside waits for main", "to beside", "inside", "to main", "beside it"]
    assert told == ([*forked, "main waits for beside"] if capturing else ["inside", "beside it"])
