"""`trueline bench ranks`: the projection by hand, and a rehearsal of tiny models on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paths import CONFIGS, HELPERS
from trueline.bench.ranks.projection import (
    Deeper,
    Exchanges,
    Interconnect,
    RankMemory,
    StepCost,
    projected,
    whole_cost,
)
from trueline.bench.ranks.rank import Rehearsed, Step, layer_kinds
from trueline.bench.ranks.rehearsal import Rehearsal, Scenario, rehearse
from trueline.cli import main
from trueline.device import Device
from trueline.models import read_model
from trueline.spec.feedforward import DenseSpec

Tiny = Callable[..., Path]
DIVISIBLE = {
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
}
LINK = Interconnect(ranks=4, latency=10e-6, bandwidth=100e9)
SCENARIO = Scenario(interconnect=LINK, requests=(1, 3), context=20, prefill_tokens=50)


def bench(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "ranks", *map(str, arguments)])
    return int(caught.value.code or 0)


# -- arithmetic ------------------------------------------------------------------------


def test_a_collective_takes_its_latency_and_what_a_ring_passes() -> None:
    """All-reduce: 2 (n - 1) / n of its bytes over each link, all-gather half of that."""
    assert LINK.seconds(Exchanges(all_reduces=3)) == pytest.approx(30e-6)
    assert LINK.seconds(Exchanges(1, 4e6)) == pytest.approx(10e-6 + 1.5 * 4e6 / 100e9)
    both = Exchanges(2, 4e6, 1, 8e6)
    assert LINK.seconds(both) == pytest.approx(30e-6 + 60e-6 + 60e-6)
    assert Interconnect(1, 10e-6, 100e9).seconds(both) == 0


def test_layers_are_multiplied_and_the_rest_is_not() -> None:
    """Embedding and head 5 s; 1 dense layer of 2 s, 58 MoE layers of 3 s, 4 of another kind of 1 s,
    which exchange 10 and 20 bytes in two all-reduces each."""
    shallow = StepCost(5 + 2 + 3 + 1, Exchanges(7, 100.0, 1, 50.0))
    moe = StepCost(11 + 2 * 3, Exchanges(11, 120.0, 1, 50.0))
    other = StepCost(11 + 3 * 1, Exchanges(13, 160.0, 1, 50.0))
    whole = whole_cost(shallow, [Deeper(moe, 2, 57), Deeper(other, 3, 3)])
    assert whole.compute == pytest.approx(5 + 2 + 58 * 3 + 4 * 1)
    assert whole.exchanges == Exchanges(7 + 2 * 57 + 2 * 3, 100 + 57 * 10 + 3 * 20, 1, 50)


def test_a_noisy_clock_takes_nothing_away() -> None:
    shallow = StepCost(1.0, Exchanges())
    assert whole_cost(shallow, [Deeper(StepCost(0.9, Exchanges()), 2, 40)]).compute == 1.0


def test_a_step_is_computing_and_exchange() -> None:
    step = projected(64, 64, StepCost(0.018, Exchanges(100, 1e6)), Interconnect(8, 20e-6, 875e6))
    assert step.exchange == pytest.approx(100 * 20e-6 + 2e-3)
    assert step.tokens_per_s == pytest.approx(64 / 0.022)
    found = step.as_json()
    assert found["step_ms"] == pytest.approx(22)
    assert found["tokens_per_s_and_request"] == pytest.approx(1 / 0.022)


def test_tokens_that_fit() -> None:
    memory = RankMemory(weights=0, token=100, sequence=30, budget=1000)
    assert (memory.tokens(0), memory.tokens(4), memory.tokens(40)) == (10, 8, 0)


# -- one rank without the others -------------------------------------------------------


def test_results_have_the_shapes_of_all_ranks() -> None:
    alone, x = Rehearsed(4), torch.arange(6.0).view(2, 3)
    assert torch.equal(alone.all_reduce(x), x)
    assert torch.equal(alone.all_gather(x, 1), x.repeat(1, 4))
    assert alone.all_gather(x, 0).shape == (8, 3)
    assert alone.exchanges == Exchanges(1, 24, 2, 192)
    alone.begin_step()
    assert alone.exchanges == Exchanges()


def quiet(_: str) -> None:
    pass


def made_up_clock(step: Step, device: Device) -> float:
    """Runs the step; 5 ms, 2 ms a dense layer, 3 ms another, 0.1 ms a token."""
    step.run()
    dense = sum(isinstance(layer.feed_forward, DenseSpec) for layer in step.layers)
    return 1e-3 * (5 + 2 * dense + 3 * (len(step.layers) - dense) + 0.1 * step.tokens)


@pytest.fixture(scope="module")
def sparse(tiny: Tiny) -> Path:
    """One dense layer, two with experts and an indexer, three with experts that share one."""
    return tiny("glm_moe_dsa", keys=DIVISIBLE)


@pytest.fixture(scope="module")
def rehearsal(sparse: Path) -> Rehearsal:
    return rehearse(str(sparse), SCENARIO, quiet, made_up_clock)


def test_kinds_of_layers(sparse: Path) -> None:
    kinds = {kind.name: kind.layers for kind in layer_kinds(read_model(sparse))}
    assert kinds == {
        "mla + indexer + dense": (0,),
        "mla + indexer + moe": (1, 4),
        "mla + shared indexer + moe": (2, 3, 5),
    }


def test_a_made_up_clock_is_projected_exactly(rehearsal: Rehearsal) -> None:
    steps = [*rehearsal.decode, rehearsal.prefill]
    assert [step.tokens for step in steps] == [1, 3, 50]
    for step in steps:
        expected = 5 + 2 + 5 * 3 + 0.1 * step.tokens
        assert 1e3 * step.compute == pytest.approx(expected)
        assert step.exchange == LINK.seconds(step.exchanges)


def test_exchanges_are_those_of_all_layers(rehearsal: Rehearsal, sparse: Path) -> None:
    """Two all-reduces a layer and one of the embedding; one all-gather of the logits of each
    sampled token."""
    hidden = read_model(sparse).hidden_size
    for step in (*rehearsal.decode, rehearsal.prefill):
        assert step.exchanges == Exchanges(
            2 * 6 + 1, 13 * step.tokens * hidden * 4, 1, step.requests * 512 * 4
        )


def test_memory_is_that_of_a_rank(rehearsal: Rehearsal) -> None:
    """Packed weights are about what the plan counts; a latent is on every rank."""
    memory = rehearsal.memory
    assert rehearsal.plan.weight_bytes <= memory.weights < 1.5 * rehearsal.plan.weight_bytes
    assert memory.token == sum(
        group.block_bytes // group.block_size for group in rehearsal.plan.groups
    )
    assert memory.tokens(3) == memory.budget // memory.token


def test_assumptions_are_told(rehearsal: Rehearsal) -> None:
    text = "\n".join(rehearsal.assumptions())
    for part in ("of this CPU", "one rank of 4", "10 µs", "100 GB/s", "experts", "20 positions"):
        assert part in text
    assert rehearsal.local_pairs is not None
    assert 0 < rehearsal.local_pairs <= 1


def test_whole_experts_are_a_part_of_the_pairs(sparse: Path) -> None:
    """Of 12 experts a rank of 4 holds 3, and computes about a quarter of the pairs."""
    scenario = replace(SCENARIO, expert_parallel=True, requests=(1,))
    found = rehearse(str(sparse), scenario, quiet, made_up_clock)
    assert found.local_pairs == pytest.approx(0.25, abs=0.1)
    assert "holds 3 of 12 experts" in "\n".join(found.assumptions())


def test_states_are_divided_by_head(tiny: Tiny) -> None:
    keys = DIVISIBLE | {"group_norm_size": 4, "num_key_value_heads": 4}
    model = str(tiny("bailing_moe_v2_5", keys=keys))
    sizes = [
        rehearse(
            model,
            Scenario(
                interconnect=Interconnect(ranks, 0, 1e9),
                requests=(2,),
                context=8,
                prefill_tokens=8,
                depth=1,
            ),
            quiet,
            made_up_clock,
        ).memory
        for ranks in (1, 2)
    ]
    assert sizes[0].sequence == 2 * sizes[1].sequence > 0
    assert sizes[0].token == sizes[1].token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "context"), [("kimi-k2.5", 1024), ("deepseek-v3.2", 1024), ("glm-5-fp8", 8192)]
)
def test_kernels_are_compiled_before_anything_is_timed(name: str, context: int) -> None:
    """Of whole models at 8 ranks, as on a Hopper GPU. What captured steps exchange is counted while
    they are captured: two all-reduces in each of two layers and one of the embedding."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(HELPERS / "late_rehearsal.py"), name, str(context)]
    done = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["ready"] > 40
    assert found["late"] == []
    row = read_model(CONFIGS / name).hidden_size * 2
    assert found["exchanges"] == [[5, 5 * row * tokens] for tokens in (1, 16, 64, 256, 8192)]


# -- the command -----------------------------------------------------------------------


def test_the_command_measures_and_prints(sparse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--requests", "1,2", "--context", 16, "--prefill-tokens", 16, "--depth", 1)
    flags = ("--tensor-parallel-size", 2, *few)
    assert bench(sparse / "config.json", *flags, "--enable-expert-parallel") == 0
    out, err = capsys.readouterr()
    for part in ("on 2 ranks, projected", "decode, 2 at 16", "memory of a rank", "of this CPU"):
        assert part in out
    assert "1 more of mla + shared indexer + moe" in err
    assert bench(sparse, *flags, "--gpu-memory-gb", "1", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["layers"]["mla + shared indexer + moe"] == 3
    assert [step["requests"] for step in found["decode"]] == [1, 2]
    assert all(step["compute_ms"] > 0 for step in (*found["decode"], found["prefill"]))
    assert 0 < found["memory"]["cache_budget_bytes"] < 5e8
    assert found["assumptions"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--requests", "1,x"),
        ("--requests", "0"),
        ("--context", "0"),
        ("--context", "99999999"),
        ("--depth", "0"),
        ("--interconnect-gbps", "0"),
        ("--tensor-parallel-size", "3"),
        ("--tensor-parallel-size", "0"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(flags: tuple[str, str], sparse: Path) -> None:
    assert bench(sparse, *flags) == 2
