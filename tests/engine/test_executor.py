"""Between the core and what runs its steps pass plain messages only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest

from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.lightning import LightningState
from trueline.config import EngineConfig
from trueline.engine.caches import Caches
from trueline.engine.core import EngineCore
from trueline.engine.executor import LocalExecutor, StepFailed
from trueline.engine.loading import load_engine
from trueline.engine.messages import Admission, CoreRequest, StepMessage, StepResult, Unowned
from trueline.engine.params import SamplingParams
from trueline.engine.step import Step
from trueline.engine.unowned import unowned
from trueline.verify.engine import Ask, same, serve
from trueline.verify.schedules import prompt

Tiny = Callable[..., Path]
Message = TypeVar("Message")
ASKS = [
    Ask(prompt(40), 5, params={"prompt_logprobs": 2, "logprobs": 3}),
    Ask(prompt(3), 9, arrives=1, params={"temperature": 0.9, "seed": 4, "bad_words": ["a"]}),
    Ask(prompt(40), 4, arrives=8, params={"repetition_penalty": 1.3, "logit_bias": {5: 1.0}}),
]
OPTIONS = {"max_model_len": 200, "max_num_seqs": 4, "num_gpu_blocks_override": 60, "block_size": 8}


def crossed(message: Message, what: type[Message]) -> Message:
    """As another process would get it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=what)


class Crossing(LocalExecutor):
    def admit(self, admission: Admission) -> None:
        super().admit(crossed(admission, Admission))

    def poison(self, unowned: Unowned) -> None:
        super().poison(crossed(unowned, Unowned))

    def launch(self, step: StepMessage) -> Any:
        return super().launch(crossed(step, StepMessage))

    def collect(self, launched: Any) -> StepResult | StepFailed:
        outcome = super().collect(launched)
        return outcome if isinstance(outcome, StepFailed) else crossed(outcome, StepResult)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5", "glm_moe_dsa"])
def test_messages_cross_a_process_boundary(family: str, overlap: bool, tiny: Tiny) -> None:
    config = EngineConfig(**OPTIONS, overlap=overlap, poison=True)
    here = serve(load_engine(tiny(family), config).core, ASKS)
    loaded = load_engine(tiny(family), config)
    executor = Crossing(loaded.core.executor.runner, threaded=overlap)
    there = serve(EngineCore(executor, loaded.plan, config, loaded.core.fingerprint), ASKS)
    same("messages", there, here, bitwise=True)
    for ours, theirs in zip(here.outputs, there.outputs, strict=True):
        assert [(o.scores, o.prompt_scores) for o in ours if not plain(o.scores)] == [
            (o.scores, o.prompt_scores) for o in theirs if not plain(o.scores)
        ]


def plain(scores: list[Any]) -> bool:
    """Without logprobs a score is NaN, which equals nothing."""
    return any(score.logprob != score.logprob for score in scores)


def test_an_id_that_comes_again_is_another_request(tiny: Tiny) -> None:
    """While steps of its first life are in flight, and in the very next step."""
    core = load_engine(tiny("deepseek_v3"), EngineConfig(**OPTIONS, overlap=True)).core

    def ask(seed: int) -> CoreRequest:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return CoreRequest(request_id="a", prompt_token_ids=prompt(9, seed), params=params)

    def rest() -> list[int]:
        tokens: list[int] = []
        while core.has_unfinished():
            for output in core.step():
                tokens += output.token_ids
        return tokens

    core.add(ask(1))
    right = rest()
    core.add(ask(2))
    for _ in range(3):
        core.step()
    assert core.abort("a", report=False)
    first = core.add(ask(1))
    assert rest() == right
    assert core.add(ask(1)) == first + 1
    assert rest() == right


@pytest.mark.parametrize("overlap", [False, True])
def test_who_has_ended_is_told_until_it_is_heard_and_no_longer(overlap: bool, tiny: Tiny) -> None:
    """Or messages would grow with every request that ever was."""
    core = load_engine(tiny("deepseek_v3"), EngineConfig(**OPTIONS, overlap=overlap)).core
    for _ in range(4):
        serve(core, [Ask(prompt(9), 2), Ask(prompt(3), 5)])
    assert len(core.ended) <= 2
    assert set(core.executor.runner.sampling_states) == set(core.ended)


@pytest.mark.parametrize("overlap", [False, True])
def test_poison_reaches_what_nobody_owns(overlap: bool, tiny: Tiny) -> None:
    """Free blocks, the unwritten end of an owned one, free slots; and nothing that is owned."""
    config = EngineConfig(**OPTIONS, overlap=overlap, poison=True, enable_prefix_caching=False)
    core = load_engine(tiny("bailing_moe_v2_5"), config).core
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    core.add(CoreRequest(request_id="a", prompt_token_ids=prompt(11), params=params))
    for _ in range(2):
        core.step()
    request, caches = core.requests["a"], core.executor.runner.caches
    rows = caches.first(Latent).rows[:-1].view(-1, 8, caches.first(Latent).layout.width)
    first, second = request.tables[0]
    core.executor.worker.shutdown()
    assert bool(rows[first].isfinite().all())
    assert bool(rows[second, :3].isfinite().all())
    assert bool(rows[second, 5:].isnan().all())
    free = [block for block in core.pool.ids if block not in (first, second)]
    assert bool(rows[free].isnan().all())
    states = caches.first(LightningState).state
    assert int(states.isnan().flatten(1).all(1).sum()) == len(states) - 1


@pytest.mark.parametrize("length", [6, 7, 8, 9])
def test_the_first_unwritten_position_is_poisoned(length: int, tiny: Tiny) -> None:
    """What a length that is one too large would read, up to the end of the last block."""
    core = load_engine(tiny("deepseek_v3"), EngineConfig(**OPTIONS, overlap=False)).core
    core.add(CoreRequest(request_id="a", prompt_token_ids=prompt(length), params=SamplingParams()))
    core.step()
    (table,) = core.requests["a"].tables
    nothing = Step((), 0, 0, ())
    assert unowned(nothing, core.requests.values(), core.blocks, None).cells == [
        [8 * table[at // 8] + at % 8 for at in range(length, 8 * len(table))]
    ]


def test_every_store_is_poisoned_where_nobody_owns_it() -> None:
    """Blocks, the unwritten tail of others, and slots: each kind by its own group."""
    told: list[tuple[str, Any]] = []

    def store(name: str) -> Any:
        return SimpleNamespace(
            poison=lambda places: told.append((name, places)),
            poison_cells=lambda cells: told.append((f"{name} cells", cells)),
        )

    caches = object.__new__(Caches)
    caches.paged, caches.group_of = {"a": store("a"), "b": store("b")}, {"a": 1, "b": 0}
    caches.slotted = {"c": store("c")}
    caches.poison(Unowned(blocks=[[1], [2]], cells=[[3], [4]], slots=[5]))
    assert sorted(told) == [("a", [2]), ("a cells", [4]), ("b", [1]), ("b cells", [3]), ("c", [5])]
