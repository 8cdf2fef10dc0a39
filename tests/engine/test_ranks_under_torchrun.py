"""Ranks that torchrun has started: each runs the same program. One that does something else, or
stops, is named by all that still run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import os, signal, sys
from pathlib import Path
from trueline import LLM, SamplingParams
from trueline.errors import EngineBroken

model, what, scratch = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rank = os.environ["RANK"]
llm = LLM(model, tensor_parallel_size=2, distributed_executor_backend="external_launcher",
          max_model_len=96, num_gpu_blocks_override=40, engine_timeout=2.0)
prompts = [{"prompt_token_ids": [5, 9, 7]}]
if rank == "1" and what == "another step":
    prompts.append({"prompt_token_ids": [4]})
if rank == "1" and what == "stopped":
    (scratch / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
try:
    said = llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
except EngineBroken as error:
    said = error
    if what == "stopped":
        os.kill(int((scratch / "pid").read_text()), signal.SIGKILL)
(scratch / rank).write_text(str(said))
"""


def said(model: Path, what: str, scratch: Path) -> list[str]:
    """By each rank that came to its end."""
    (program := scratch / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", str(program), str(model), what, str(scratch)]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=60, env=dict(os.environ))
    return [each.read_text() for rank in "01" if (each := scratch / rank).exists()]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("deepseek_v3", keys={"intermediate_size": 96, "moe_intermediate_size": 24})


def test_the_same_program_on_all(model: Path, tmp_path: Path) -> None:
    first, second = said(model, "the same", tmp_path)
    assert first == second
    assert first.startswith("[")


def test_a_rank_that_asks_for_something_else(model: Path, tmp_path: Path) -> None:
    first, second = said(model, "another step", tmp_path)
    assert first == second
    assert "rank 1: it has scheduled another step than rank 0" in first


def test_a_rank_that_stops(model: Path, tmp_path: Path) -> None:
    (first,) = said(model, "stopped", tmp_path)
    assert "no step ended within 2 s (engine_timeout): " in first
    assert "silent (stopped, or on a machine that is not reached): rank 1" in first
