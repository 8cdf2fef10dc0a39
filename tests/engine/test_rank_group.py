"""What ranks agree on and tell each other, two of them as threads over gloo; and what of a plan and
a config is each rank's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from trueline.config import EngineConfig
from trueline.device import find_device
from trueline.engine.loading import _facts, _local_spec, _smallest
from trueline.engine.ranks.join import place_of
from trueline.engine.ranks.processes import how_it_ended
from trueline.models import read_model
from trueline.parallel.distributed import Control
from trueline.parallel.group import Place, RankFailed, RankGroup
from trueline.parallel.placement import Divided, Partial
from trueline.parallel.process_group import c10d
from trueline.plan.plan import make_plan
from trueline.spec.feedforward import MoESpec

CONFIG = EngineConfig(device="cpu", max_model_len=64, num_gpu_blocks_override=40)


def on_two(work: Callable[[RankGroup], Any]) -> list[Any]:
    """What each rank made of it."""
    store, found = c10d.HashStore(), [None, None]
    both = threading.Barrier(2, timeout=20)  # who closes ends the connections of the other too

    def rank(number: int) -> None:
        place = Place(rank=number, size=2, local_rank=number, local_size=2)
        group = RankGroup(store, place, "gloo", seconds=20.0)
        try:
            found[number] = work(group)
            both.wait()
        finally:
            group.close()

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_collectives_over_gloo() -> None:
    def work(group: RankGroup) -> list[Tensor]:
        x = torch.arange(6.0).view(2, 3) + 10 * group.place.rank
        ranks = group.collective
        return [
            ranks.all_gather(Divided(x), 0),
            ranks.all_gather(Divided(x), 1),
            ranks.from_first(x.clone()),
            ranks.all_reduce(Partial(x.clone())),
        ]

    first = torch.arange(6.0).view(2, 3)
    second = first + 10
    wanted = [torch.cat((first, second), dim) for dim in (0, 1)] + [first, first + second]
    for found in on_two(work):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("length", [0, 5, Control.FIRST - 8, Control.FIRST, 3 * Control.FIRST])
def test_messages_of_any_length(length: int) -> None:
    message = bytes(i * i % 251 for i in range(length))

    def work(group: RankGroup) -> bytes:
        if group.place.rank:
            return group.control.hear()
        group.control.tell(message)
        return message

    assert on_two(work) == [message, message]


def test_the_smallest_of_every_number() -> None:
    found = on_two(lambda group: group.control.smallest([[9, 3], [4, 7]][group.place.rank]))
    assert found == [[4, 3], [4, 3]]


def test_the_table_is_by_rank_and_the_first_failure_counts() -> None:
    def work(group: RankGroup) -> tuple[list[list[str]], bool]:
        table = group.table([f"row {group.place.rank}"])
        first = group.place.rank == 1 and group.report("out of memory")
        again = group.place.rank == 1 and group.report("the others are gone")
        return table, first and not again and group.reported() == "rank 1: out of memory"

    first, second = on_two(work)
    assert first[0] == second[0] == [["row 0"], ["row 1"]]
    assert second[1]


def test_who_differs_is_named() -> None:
    def work(group: RankGroup) -> str:
        try:
            group.agree({"the dtype": "float32", "the version": str(group.place.rank)})
        except RankFailed as error:
            return str(error)
        return ""

    assert on_two(work) == [
        "",
        "rank 1 and rank 0 differ in the version: 1 and 0; all ranks must be the same",
    ]


@pytest.fixture(scope="module")
def hybrid(tiny: Callable[..., Path]) -> Path:
    return tiny("bailing_moe_v2_5")


def test_blocks_and_slots_are_the_smallest_ranks(hybrid: Path) -> None:
    plan = make_plan(read_model(hybrid), CONFIG, find_device("cpu"))
    assert plan.slots is not None
    asked: list[list[int]] = []

    def smallest(counts: list[int]) -> list[int]:
        asked.append(counts)
        return [30, 5]

    group = cast("RankGroup", SimpleNamespace(control=SimpleNamespace(smallest=smallest)))
    found = _smallest(plan, group)
    assert asked == [[plan.groups[0].num_blocks, plan.slots.num_slots]]
    assert [each.num_blocks for each in found.groups] == [30]
    assert found.slots is not None
    assert found.slots.num_slots == 5
    assert found.cache_bytes == 30 * found.groups[0].block_bytes


def test_experts_are_divided_as_the_option_says(hybrid: Path) -> None:
    spec = read_model(hybrid)
    config = replace(CONFIG, tensor_parallel_size=2, enable_expert_parallel=True)
    local = _local_spec(spec, config, 1)
    (moe, *_) = [
        each.feed_forward for each in local.layers if isinstance(each.feed_forward, MoESpec)
    ]
    assert (moe.experts.start, moe.experts.count) == (6, 6)
    assert moe.expert_width.is_whole


def test_what_must_be_the_same_on_every_rank(hybrid: Path, tmp_path: Path) -> None:
    spec = read_model(hybrid)
    plan = make_plan(spec, CONFIG, find_device("cpu"))
    facts = _facts(hybrid, spec, plan, CONFIG)
    assert _facts(hybrid, spec, plan, replace(CONFIG, master_addr="10.0.0.2")) == facts
    assert _facts(hybrid, spec, plan, replace(CONFIG, seed=7)) != facts
    for file in hybrid.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert _facts(tmp_path, spec, plan, CONFIG) == facts
    longer = next(tmp_path.glob("*.safetensors"))
    longer.write_bytes(longer.read_bytes() + b" ")
    assert _facts(tmp_path, spec, plan, CONFIG) != facts


def test_a_rank_of_the_second_machine() -> None:
    config = replace(
        CONFIG, tensor_parallel_size=8, nnodes=2, node_rank=1, distributed_executor_backend="mp"
    )
    assert place_of(config, 3) == Place(rank=7, size=8, local_rank=3, local_size=4)


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "was killed by SIGKILL"), (3, "ended with exit code 3")]
)
def test_how_a_rank_has_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words
