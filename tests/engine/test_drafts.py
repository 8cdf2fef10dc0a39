"""Rows of 1 + k tokens: whatever is drafted, answers are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spread import diagonal
from trueline import LLM
from trueline.cache.blocks import NULL_BLOCK, BlockPool
from trueline.cache.groups import BlockGroups
from trueline.config import EngineConfig
from trueline.engine.batch import SamplingPoint, build_batch, check_order
from trueline.engine.core import EngineCore
from trueline.engine.drafts import place_drafts
from trueline.engine.executor import local_runner
from trueline.engine.live_request import LiveRequest
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest, StepMessage, StepRow
from trueline.engine.params import SamplingParams
from trueline.engine.request import Request
from trueline.engine.results import SampledTokens, StepHandle
from trueline.engine.step import Row
from trueline.errors import UsageError
from trueline.ops.sampling import SamplingState
from trueline.verify.drafts import ForcedDrafts, patterns, same_scores
from trueline.verify.engine import Ask, EngineRun, run, same, serve
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
BASE = EngineConfig(
    max_model_len=96, max_num_seqs=4, num_gpu_blocks_override=200, block_size=4, overlap=False
)
FAMILIES = ("deepseek_v3", "bailing_moe_v2_5", "deepseek_v32", "glm_moe_dsa")
K = 3


def drafting(
    model: Path, asks: list[Ask], plain: EngineRun, config: EngineConfig, drafter: ForcedDrafts
) -> EngineCore:
    drafter.num_tokens = K
    drafter.answers = {
        f"check-{i}": [*ask.prompt, *tokens]
        for i, (ask, tokens) in enumerate(zip(asks, plain.tokens, strict=True))
    }
    return load_engine(model, config, drafter=drafter).core


def compared(
    model: Path, asks: list[Ask], config: EngineConfig, *, bitwise: bool = False
) -> tuple[EngineCore, EngineRun]:
    plain = run(model, asks, config)
    every = [each for count in range(K + 1) for each in patterns(count)]
    core = drafting(model, asks, plain, config, ForcedDrafts(every))
    drafted = serve(core, asks)
    same("drafts", drafted, plain, bitwise=bitwise)
    same_scores("drafts", drafted, plain)
    core.pool.check()
    assert core.pool.num_free == core.pool.num_usable
    if core.slots:
        core.slots.check()
        assert core.slots.num_free == core.slots.num_usable
    return core, drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_drafts(family: str, tiny: Tiny) -> None:
    """In batch-invariant mode a drafted token has the very bits of a decoded one."""
    asks = [Ask(prompt(21), 30, params={"logprobs": 1}), Ask(prompt(50), 20, arrives=3)]
    config = replace(BASE, batch_invariant=True, max_num_batched_tokens=16, poison=True)
    compared(tiny(family), asks, config, bitwise=True)


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5"])
def test_preempted_with_drafts(family: str, tiny: Tiny) -> None:
    """Blocks for three at a time, all of whom want more; slots for hardly any snapshot."""
    asks = [Ask(prompt(20, i), 30) for i in range(4)]
    config = replace(BASE, num_gpu_blocks_override=34, num_state_slots=4 * (1 + K) + 1)
    core, _ = compared(tiny(family), asks, config)
    assert core.scheduler.counters.num_preemptions


def test_drafts_take_what_is_left_of_the_budget(tiny: Tiny) -> None:
    """Beside a long prompt rows of one token get none."""
    model, asks = tiny("deepseek_v3"), [Ask(prompt(8), 12), Ask(prompt(60), 4, arrives=2)]
    config = replace(BASE, max_num_batched_tokens=9)
    plain = run(model, asks, config)
    core = drafting(model, asks, plain, config, ForcedDrafts([(True,) * K]))
    runner, steps = local_runner(core.executor), list[list[int]]()
    launch = runner.launch

    def watched(step: StepMessage) -> Any:
        steps.append([len(row.token_ids) for row in step.rows])
        return launch(step)

    runner.launch = watched  # type: ignore[method-assign]
    assert serve(core, asks).tokens == plain.tokens
    assert [4] in steps
    assert all(sum(step) <= 9 for step in steps)
    assert [1, 8] in steps, "the prompt comes first"


@pytest.mark.parametrize(
    ("free", "budget", "limit", "placed"),
    [
        (0, 9, 20, 1),  # the last block has room for one
        (1, 9, 20, 3),
        (9, 9, 20, 3),
        (9, 2, 20, 2),
        (9, 0, 20, 0),
        (9, 9, 8, 2),  # a token comes without drafts, and one with each
        (9, 9, 7, 1),
        (9, 9, 6, 0),
    ],
)
def test_how_many_drafts_a_row_carries(free: int, budget: int, limit: int, placed: int) -> None:
    """As many as blocks, budget and the request's own limit allow, not all or none."""
    blocks = BlockGroups([BlockPool(1 + 3 + free, 2, True)])
    request = Request("one", 4, 20)
    request.tables, request.token_limit = blocks.empty(), limit
    blocks.allocate(request.tables, 6)
    request.num_tokens, request.num_computed, request.num_drafts = 5, 4, K
    assert place_drafts({request: 1}, blocks, budget) == {request: placed}
    assert len(request.tables[0]) == max(3, -(-(4 + 1 + placed) // 2))
    assert place_drafts({request: 1}, blocks, budget) == {request: 0}, "drafted once"


def test_drafts_keep_what_any_of_them_needs() -> None:
    """A compressor of 2 tokens reads the window before: after the first draft the first block."""
    blocks = BlockGroups([BlockPool(9, 2, False, 4, 2, keeps_ends=True)])
    request = Request("one", 2, 20)
    request.tables, request.token_limit = blocks.empty(), 20
    request.num_tokens, request.num_computed, request.num_drafts = 2, 1, 5
    blocks.allocate(request.tables, 1)
    assert place_drafts({request: 1}, blocks, 20) == {request: 5}
    assert NULL_BLOCK not in request.tables[0]


@pytest.mark.parametrize(
    ("tokens", "computed", "count"), [(1, 0, 1), (5, 3, 1), (5, 3, 2), (5, 0, 5)]
)
def test_only_decode_rows_carry_drafts(tokens: int, computed: int, count: int) -> None:
    """Not a prompt of one token, nor what a chunk leaves of a prompt."""
    blocks = BlockGroups([BlockPool(9, 2, True)])
    request = Request("one", tokens, 20)
    request.tables, request.token_limit = blocks.empty(), 20
    request.num_computed, request.num_drafts = computed, K
    assert place_drafts({request: count}, blocks, 9) == {request: 0}


@pytest.mark.parametrize("num_drafts", range(K + 1))
def test_a_row_carries_the_first_drafts(num_drafts: int) -> None:
    """Where there is no room for all of them, the last ones are left out."""
    message = CoreRequest(request_id="one", prompt_token_ids=[4, 5], params=SamplingParams())
    request = LiveRequest(
        request_id="one", num_prompt_tokens=2, max_new_tokens=9, message=message,
        tokens=[4, 5, 6], salt=b"", seed=0,
    )  # fmt: skip
    request.drafts = [7, 8, 9]
    sent = request.step_row(
        Row(
            request=request, start=2, count=1 + num_drafts, is_decode=True, samples=True,
            num_drafts=num_drafts, state=None,
        )
    )  # fmt: skip
    assert sent.token_ids == [6, 7, 8, 9][: 1 + num_drafts]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_proposes_too_much(overlap: bool, tiny: Tiny) -> None:
    """Slots and graphs are there for as many drafts as it has announced. Where steps could be
    launched ahead of results, a drafter still gets to see these."""
    model, asks = tiny("bailing_moe_v2_5"), [Ask(prompt(6), 12)]
    plain, config = run(model, asks, BASE), replace(BASE, overlap=overlap)
    core = drafting(model, asks, plain, config, ForcedDrafts([(True,) * (K + 2)]))
    runner, sizes = local_runner(core.executor), set[int]()
    launch = runner.launch

    def watched(step: StepMessage) -> Any:
        sizes.update(len(row.token_ids) for row in step.rows if row.is_decode)
        return launch(step)

    runner.launch = watched  # type: ignore[method-assign]
    assert serve(core, asks).tokens == plain.tokens
    assert max(sizes) == 1 + K


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_answers_end_where_they_would(max_tokens: int, tiny: Tiny) -> None:
    """By their length, however many right drafts there are beyond; none is computed."""
    model, asks = tiny("bailing_moe_v2_5"), [Ask(prompt(6), 9)]
    plain = run(model, asks, BASE)
    short = [replace(asks[0], max_tokens=max_tokens)]
    core = drafting(model, asks, plain, BASE, ForcedDrafts([(True,) * K]))
    done = serve(core, short)
    assert done.tokens == [plain.tokens[0][:max_tokens]]
    assert done.outputs[0][-1].finish_reason == "length"
    assert max(done.logits[0]) == 6 + max_tokens - 2, "the last token is never computed"


@pytest.mark.parametrize(
    ("pattern", "family"),
    diagonal(patterns(2), ["deepseek_v3", "bailing_moe_v2_5", "deepseek_v32"]),
)
def test_a_stop_in_a_row_leaves_a_right_cache(
    family: str, pattern: tuple[bool, ...], tiny: Tiny
) -> None:
    """A row ends at each token of the answer in turn; with blocks of one token each is found by
    whoever comes next, and none that a wrong draft has written."""
    model, ask = tiny(family), Ask(prompt(5), 7)
    config = replace(BASE, block_size=1, max_model_len=40, snapshot_spacing=1)
    plain = run(model, [ask], config)
    answer = plain.tokens[0]
    for last in dict.fromkeys(answer):
        end = answer.index(last) + 1
        core = drafting(model, [ask], plain, config, ForcedDrafts([pattern]))
        done = serve(core, [replace(ask, params={"stop_token_ids": [last]})])
        assert done.tokens == [answer[:end]]
        core.drafter = None
        turn = [Ask([*ask.prompt, *answer[:end], 3, 4], 2)]
        again = serve(core, turn)
        assert again.cached == [5 + end - 1]
        same("next turn", again, run(model, turn, config, enable_prefix_caching=False))


def test_a_bad_row_ends_with_the_tokens_before_it(tiny: Tiny) -> None:
    """NaN at one position, met as a draft: the tokens before it, and plain decoding's error."""
    model, ask = tiny("deepseek_v3"), Ask(prompt(6), 12)
    plain = run(model, [ask], BASE)
    told = []
    for drafts in (False, True):
        core = drafting(model, [ask], plain, BASE, ForcedDrafts([(True,) * K if drafts else ()]))
        decoder = local_runner(core.executor).decoder
        hidden = decoder.hidden

        def broken(step: Any, views: Any, hidden: Any = hidden) -> torch.Tensor:
            made: torch.Tensor = hidden(step, views)
            made[step.positions == 9] = torch.nan
            return made

        decoder.hidden = broken  # type: ignore[method-assign]
        done = serve(core, [ask], may_fail=True)
        told.append((done.tokens, done.outputs[0][-1].error))
    assert told[0] == told[1]
    assert told[0][0] == [plain.tokens[0][:4]]
    assert "position 9" in str(told[0][1])


def test_what_is_bad_beyond_the_end_is_nobodys(tiny: Tiny) -> None:
    """A row whose drafts reach beyond a stop token, and NaN there: the answer has ended before."""
    model, ask = tiny("deepseek_v3"), Ask(prompt(6), 12)
    plain = run(model, [ask], BASE)
    answer = plain.tokens[0]
    last = next(i for i in range(1, K + 1) if answer.index(answer[i]) == i)
    core = drafting(model, [ask], plain, BASE, ForcedDrafts([(True,) * K]))
    decoder = local_runner(core.executor).decoder
    hidden = decoder.hidden

    def broken(step: Any, views: Any) -> torch.Tensor:
        made: torch.Tensor = hidden(step, views)
        made[step.positions == 6 + last] = torch.nan
        return made

    decoder.hidden = broken  # type: ignore[method-assign]
    done = serve(core, [replace(ask, params={"stop_token_ids": [answer[last]]})])
    assert done.tokens == [answer[: last + 1]]
    assert done.outputs[0][-1].finish_reason == "stop"


def test_nothing_counts_after_a_bad_token() -> None:
    """Whatever stands in its place, be it the very token that was drafted."""
    params = SamplingParams(temperature=0.0)
    state = SamplingState(
        params=params, prompt_ids=[1], output_ids=[], position=1, eos_ids=[], seed=0
    )
    points = (SamplingPoint(0, 0, 0, (), 7), SamplingPoint(1, 0, 0, (7,), None))
    tokens, bad = torch.tensor([7, 8]), torch.tensor([True, False])
    result = StepHandle(points, [state, state], SampledTokens(tokens, bad, None), []).result()
    assert (result.bad, result.sampled) == ([0], {})


def row(**changes: Any) -> StepRow:
    fields: dict[str, Any] = {
        "id": 0, "start": 4, "token_ids": [7, 8, 9], "tables": [[1, 2]], "is_decode": True,
        "samples": True, "num_drafts": 2,
    }  # fmt: skip
    return StepRow(**fields | changes)


def test_a_row_samples_after_each_of_its_tokens() -> None:
    batch = build_batch(StepMessage(rows=[row(), row(token_ids=[5], num_drafts=0)]), [4])
    assert [(p.token, p.row, p.drafts, p.draft) for p in batch.samples] == [
        (0, 0, (), 8),
        (1, 0, (8,), 9),
        (2, 0, (8, 9), None),
        (3, 1, (), None),
    ]
    assert batch.tokens_per_row is None
    assert build_batch(StepMessage(rows=[row(), row()]), [4]).tokens_per_row == 3
    prompt_of_one = row(start=0, token_ids=[5], num_drafts=0, is_decode=False)
    assert build_batch(StepMessage(rows=[prompt_of_one] * 2), [4]).tokens_per_row is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_drafts": 1},
        {"num_drafts": 3},
        {"start": 0},
        {"samples": False},
        {"is_decode": False},
    ],
)
def test_rows_that_no_scheduler_sends(changes: dict[str, Any]) -> None:
    check_order(StepMessage(rows=[row()]))
    with pytest.raises(AssertionError):
        check_order(StepMessage(rows=[row(**changes)]))


@pytest.mark.parametrize("given", [{"method": "mtp"}, '{"method": "dspark"}', {}])
def test_a_request_to_draft_is_refused_by_name(given: Any, tiny: Tiny) -> None:
    """Also of a checkpoint that brings draft layers."""
    with pytest.raises(UsageError, match=r"speculative_config = .*nothing drafts yet"):
        LLM(str(tiny("deepseek_v4", keys={"dspark_block_size": 5})), speculative_config=given)
