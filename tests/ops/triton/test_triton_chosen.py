"""Prefill in Triton over what tokens chose, through the interpreter (or on the GPU where there is
one): every way to cut the work, and which runs of a step take it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from trueline.cache.kinds.inputs import FixedRows
from trueline.cache.kinds.latent import LatentInputs, LatentRows
from trueline.cache.layout import LatentLayout
from trueline.engine import memory
from trueline.engine.core import EngineCore
from trueline.ops.mla_prefill import FEW, masked_context
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import triton as prefill
from trueline.verify.cases import make_subject
from trueline.verify.masked import interpreted
from trueline.verify.ops import chosen
from trueline.verify.schedules import base

FLOATS = (torch.float32, torch.float16)
PLANS = {
    "one word": {"queries": 32, "keys": 32},
    "half a word": {"queries": 32, "keys": 16, "workspace": 64},
    "two words": {"queries": 32, "keys": 64, "workspace": 128},
}
"""Four words: test_triton_attention.py."""
EACH = [("two words", torch.float16)]
OTHERS = [
    pytest.param(plan, dtype, marks=pytest.mark.slow)
    for plan in PLANS
    for dtype in FLOATS
    if (plan, dtype) not in EACH
]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.mark.parametrize(("plan", "dtype"), [*EACH, *OTHERS])
def test_chosen(monkeypatch: pytest.MonkeyPatch, plan: str, dtype: torch.dtype) -> None:
    def launch(*given: Any) -> prefill_cut.PrefillLaunchPlan:
        return replace(prefill_cut.launch(*given), **PLANS[plan])

    monkeypatch.setattr(prefill, "launch", launch)
    monkeypatch.setattr(prefill, "CHUNK", 16)
    chosen.chosen(prefill, dtype)


# -- which runs take it ----------------------------------------------------------------


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    subject = make_subject("v32-near", tmp_path_factory.mktemp("chosen") / "v32")
    made = interpreted(subject, replace(base(subject), enforce_eager=True))
    yield made
    made.close()


def latent(core: EngineCore) -> LatentInputs:
    inputs = core.executor.runner.inputs.kinds["latent"]
    assert isinstance(inputs, LatentInputs)
    return inputs


def read(core: EngineCore, rows: list[tuple[int, int]]) -> LatentRows:
    """Rows as (cached positions, new ones)."""
    return latent(core).read(memory.made_up_batch(core.plan, rows).rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
@pytest.mark.parametrize("count", [FEW + 1, 40, 100])
def test_contexts_around_the_longest(core: EngineCore, count: int) -> None:
    start = latent(core).kind.longest_masked(count) - count
    rows = read(core, [(start, count)])
    (part,) = rows.masked
    assert not rows.selected_at
    assert (part.row.start, part.row.count, part.chosen) == (start, count, 0)
    assert part.tokens == slice(0, count)
    rows = read(core, [(start + 1, count)])
    assert (len(rows.selected.lengths), rows.masked) == (count, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
def test_batch_invariant_runs_attend_over_lists(core: EngineCore) -> None:
    """In one form, however many tokens a step has."""
    free = latent(core)
    inputs = LatentInputs(free.kind, replace(free.context, batch_invariant=True))
    rows = memory.made_up_batch(core.plan, [(0, 70)]).rows
    assert free.read(rows).masked
    assert not inputs.read(rows).masked


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
@pytest.mark.parametrize("more", [0, 1])
def test_a_captured_step_chooses_where_it_attends_to_what_was_chosen(
    core: EngineCore, more: int
) -> None:
    """At most topk positions: nobody scores any. With one more all tokens do."""
    kinds, topk = core.executor.runner.inputs.kinds, latent(core).topk
    assert topk is not None
    fixed = FixedRows(
        lengths=torch.tensor([topk + more, 1], dtype=torch.int32),
        columns={},
        tables=[torch.ones(2, 99, dtype=torch.int32)],
        tokens_per_row=1,
        longest=topk + more,
    )
    attending, choosing = kinds["latent"].read_fixed(fixed), kinds["index_keys"].read_fixed(fixed)
    assert len(attending.selected.lengths) == len(choosing.rows.lengths) == 2 * more
    assert len(attending.decode.lengths) == 2 - 2 * more


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
@pytest.mark.parametrize("more", [1, 2, 3, 16, 17])
def test_captured_tables_reach_the_longest_context(core: EngineCore, more: int) -> None:
    """Its last block is seldom full."""
    kinds, longest = core.executor.runner.inputs.kinds, (latent(core).topk or 0) + more
    fixed = FixedRows(
        lengths=torch.tensor([longest], dtype=torch.int32),
        columns={},
        tables=[torch.ones(1, 99, dtype=torch.int32)],
        tokens_per_row=1,
        longest=longest,
    )
    size = latent(core).kind.block_size
    for table in (
        kinds["latent"].read_fixed(fixed).selected,
        kinds["index_keys"].read_fixed(fixed).rows,
    ):
        assert table.blocks.shape[1] == -(-longest // size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
def test_runs_of_a_step(core: EngineCore) -> None:
    """A row that decodes, one that does not choose, a prompt whose beginning does not, few tokens,
    many after much: rows and tokens are counted apart."""
    topk = latent(core).topk
    assert topk is not None
    rows = read(core, [(60, 1), (5, 9), (0, 70), (30, FEW), (300, 40), (topk, FEW + 1)])
    lists = [0, *range(80, 80 + FEW + 40)]
    assert rows.selected_at == lists
    first = 1 + 70 - topk
    assert rows.selected_rows == [0, *range(first, first + FEW + 40)]
    assert len(rows.selected.lengths) == len(lists)
    tokens = 80 + FEW + 40
    assert [(part.tokens, part.row.start, part.chosen) for part in rows.masked] == [
        (slice(10 + topk, 80), topk, 1),
        (slice(tokens, tokens + FEW + 1), topk, first + FEW + 40),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
def test_where_there_is_no_such_op(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent(core), "masked", None)
    assert not read(core, [(0, 70)]).masked


@pytest.mark.skipif(torch.cuda.is_available(), reason="made for a CPU")
def test_memory_is_measured_for_both(core: EngineCore) -> None:
    """Steps of tokens that all choose: those with most cached before attend over lists."""
    plan = replace(core.plan, limits=replace(core.plan.limits, max_num_batched_tokens=60))
    kinds = []
    for most in memory._contexts(plan):
        rows = latent(core).read(memory._prefill(plan, most).rows)
        kinds.append((bool(rows.selected_at), [part.row.count for part in rows.masked]))
    assert kinds == [(True, []), (False, [60])]


def test_what_is_masked_at_real_sizes() -> None:
    """DeepSeek-V3.2's."""
    layout, topk = LatentLayout(512, 64, 64), 2048
    assert 5.5 * topk < masked_context(layout, 128, 128, topk, 2048) < 5.6 * topk
    assert masked_context(layout, 128, 128, topk, 8192) < 7 * topk
    assert masked_context(layout, 128, 128, topk, FEW) < topk
