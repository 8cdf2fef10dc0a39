"""Ranks as processes: they compute what one does, and one that is gone is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.params import SamplingParams
from trueline.engine.ranks.executor import RanksExecutor
from trueline.errors import EngineBroken

BASE = EngineConfig(
    device="cpu", dtype="float32", batch_invariant=True, max_logprobs=-1, max_model_len=96,
    max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_gpu_blocks_override=20,
)  # fmt: skip
ALL = SamplingParams(max_tokens=6, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
DRAWN = SamplingParams(max_tokens=9, seed=5, logprobs=-1)


def ask(core: EngineCore, name: str, length: int, params: SamplingParams) -> None:
    ids = [(7 * i + 3 * length) % 90 + 5 for i in range(length)]
    core.add(CoreRequest(request_id=name, prompt_token_ids=ids, params=params))


def answers(core: EngineCore) -> dict[str, list[CoreOutput]]:
    """A mixed batch that preempts, draws with seeds and reports every logprob."""
    outputs: dict[str, list[CoreOutput]] = {}
    for number, length in enumerate((31, 5, 17, 1, 40, 23)):
        ask(core, f"all {number}", length, ALL)
        ask(core, f"drawn {number}", length, DRAWN)
    while core.has_unfinished():
        for output in core.step():
            output.first_scheduled = None
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    keys = {"num_attention_heads": 8, "hidden_size": 80, "n_routed_experts": 16,
            "intermediate_size": 96, "moe_intermediate_size": 24}  # fmt: skip
    return tiny("deepseek_v3", keys=keys)


@pytest.fixture
def ranks(model: Path) -> Iterator[EngineCore]:
    core = load_engine(model, replace(BASE, tensor_parallel_size=2)).core
    yield core
    core.close()


def test_two_processes_give_the_bits_of_one(model: Path, ranks: EngineCore) -> None:
    one = load_engine(model, BASE).core
    expected = answers(one)
    one.close()
    found = answers(ranks)
    assert found == expected
    assert any(output.scores[0].top for output in found["all 0"] if output.scores)


def test_a_killed_rank_is_named(ranks: EngineCore) -> None:
    executor = ranks.executor
    assert isinstance(executor, RanksExecutor)
    ask(ranks, "first", 9, ALL)
    ranks.step()
    os.kill(executor.processes.pids()[1], signal.SIGKILL)
    with pytest.raises(EngineBroken, match="rank 1 was killed by SIGKILL"):
        answers(ranks)
