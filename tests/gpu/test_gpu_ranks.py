"""Ranks on a GPU: NCCL's collectives in captured steps at one rank, and two ranks. Collectives
between GPUs need two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trueline.config import EngineConfig
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest, TokenScore
from trueline.engine.params import SamplingParams
from trueline.engine.ranks.executor import RanksExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]
KEYS = {"num_attention_heads": 8, "hidden_size": 128, "n_routed_experts": 16,
        "intermediate_size": 256, "moe_intermediate_size": 64}  # fmt: skip
BASE = EngineConfig(
    device="cuda", dtype="float32", max_model_len=256, max_num_seqs=8, max_logprobs=-1,
    max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 26,
)  # fmt: skip


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v32"])
def model(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Path:
    return tiny(request.param, keys=KEYS)


def answers(core: EngineCore) -> dict[str, list[TokenScore]]:
    """Of a mixed batch, every position with all logprobs."""
    found: dict[str, list[TokenScore]] = {}
    asked = SamplingParams(max_tokens=8, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    for number, length in enumerate((31, 5, 70, 1, 40, 23)):
        ids = [(7 * i + 3 * length) % 90 + 5 for i in range(length)]
        core.add(CoreRequest(request_id=str(number), prompt_token_ids=ids, params=asked))
    while core.has_unfinished():
        for output in core.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend((*output.prompt_scores, *output.scores))
    return found


def run(model: Path, config: EngineConfig) -> dict[str, list[TokenScore]]:
    core = load_engine(model, config).core
    try:
        return answers(core)
    finally:
        core.close()


def table(scores: list[TokenScore]) -> torch.Tensor:
    """[positions, vocabulary]"""
    return torch.tensor([[value for _, value in sorted(score.top)] for score in scores])


def test_captured_steps_have_nccl_in_them(model: Path) -> None:
    core = load_engine(model, replace(BASE, distributed_executor_backend="mp")).core
    try:
        assert isinstance(core.executor, RanksExecutor)
        assert core.executor.group.backend == "nccl"
        assert local_runner(core.executor).graphs is not None
        entered = core.executor.group.journal.last.number
        assert entered > 0, "no exchange was captured"
        found = answers(core)
    finally:
        core.close()
    assert found == run(model, BASE)


def test_two_ranks(model: Path) -> None:
    """That share a GPU, through gloo; each with its own, through NCCL in captured steps."""
    eager = torch.cuda.device_count() < 2
    one = run(model, replace(BASE, enforce_eager=True))
    two = run(model, replace(BASE, enforce_eager=eager, tensor_parallel_size=2))
    for name, scores in one.items():
        assert [s.token_id for s in two[name]] == [s.token_id for s in scores]
        difference = (table(two[name]) - table(scores)).abs().max().item()
        assert difference <= 2e-5, f"request {name}: {difference}"
