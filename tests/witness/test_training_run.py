"""A training of V4 from its sequences to the files beside its weights, on a CPU: too short to learn
anything, long enough for every stage."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trueline.utils.builtin import BUILTIN_MODELS
from witness import configs, data, finish, steps, train
from witness.steps import DenseStep, Pace

NAME, LENGTH, STEPS = "witness-v4", 192, 24
SMALL = {
    "hidden_size": 32, "head_dim": 32, "q_lora_rank": 16, "o_lora_rank": 16, "index_head_dim": 16,
    "index_topk": 8, "n_routed_experts": 4, "moe_intermediate_size": 8, "hc_mult": 2,
    "num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"],
    "layer_types": configs.CONFIGS[NAME]["layer_types"][:2],
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Short sequences, small batches, few questions."""
    monkeypatch.setitem(configs.CONFIGS, NAME, configs.CONFIGS[NAME] | SMALL)
    monkeypatch.setattr(data, "LENGTH", LENGTH)
    monkeypatch.setattr(data, "PART", 8)
    monkeypatch.setattr(data, "LONG_SHARE", (0.0, 0.0))
    monkeypatch.setattr(data, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(steps, "BATCH", 2)
    monkeypatch.setattr(steps, "TRIED", 3)
    monkeypatch.setattr(train, "CHECKED", ("1 operation",))
    monkeypatch.setattr(train, "BEGIN", range(STEPS))
    monkeypatch.setattr(train, "CHECKPOINT", 0.0)
    monkeypatch.setattr(finish, "COUNTS", dict.fromkeys(finish.COUNTS, 5))
    monkeypatch.setattr(finish, "COMPARED", {"2 operations": 1})
    return tmp_path


@pytest.mark.slow
def test_every_stage_of_a_training(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool, bool]] = []
    original = DenseStep.__call__

    def watched(self: steps.V4Step, step: int) -> object:
        losses = original(self, step)
        assert (work / NAME / "model.safetensors").exists() == (step > 0)
        seen.append((step, self.sparse, self.selects))
        return losses

    monkeypatch.setattr(DenseStep, "__call__", watched)
    making = threading.Thread(
        target=train.make_data, args=(work, 2 * STEPS, BUILTIN_MODELS["witness-v3"].path)
    )
    making.start()
    train.train_dense(work, NAME, STEPS, device="cpu")
    making.join()
    assert [step for step, sparse, _ in seen if sparse] == [0, 1, 2, *range(14, STEPS)]
    assert [step for step, _, selects in seen if selects] == list(range(16, STEPS))
    log = [json.loads(row) for row in (work / NAME / "training.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]

    finish.finish(work, work / "models", NAME)
    made = work / "models" / NAME
    assert {file.name for file in made.iterdir()} == {
        file.name for file in BUILTIN_MODELS["witness-v3"].path.iterdir()
    }
    scores = json.loads((made / "scores.json").read_text())
    assert scores["steps"] == STEPS
    assert scores["training_code_minus_reference"] < finish.GATE
    stored = load_file(made / "model.safetensors")
    assert stored["layers.1.attn.indexer.wq_b.weight"].dtype == torch.bfloat16
    assert stored["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


def test_sequences_are_waited_for(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = data._part

    def late(*given: object) -> object:
        time.sleep(0.05)
        return slow(*given)

    monkeypatch.setattr(data, "_part", late)
    given = BUILTIN_MODELS["witness-v3"].path
    making = threading.Thread(target=train.make_data, args=(work, 32, given))
    making.start()
    sequences = data.Sequences(work)
    tokens, answers = sequences.batch(15, 2)
    assert (work / data.MADE).read_text() == "32"
    making.join()
    packer = data.Packer(train.Tokenizer.from_file(str(given / "tokenizer.json")), train.SEED, 32)
    for row, number in enumerate((30, 31)):
        for found, expected in zip((tokens, answers), packer.sequence(number), strict=True):
            assert (np.asarray(found[row]) == expected).all()
    assert (sequences.batch(16, 2)[0] == sequences.batch(0, 2)[0]).all()
    monkeypatch.setattr(data, "PATIENCE", 0.05)
    (work / data.MADE).write_text("16")
    with pytest.raises(TimeoutError, match="16 sequences, and no more"):
        data.Sequences(work).batch(8, 2)


def test_a_schedule_ends_in_time() -> None:
    pace = Pace(10_000, 400.0)
    assert not pace.plan(20, 60.0, 0.5)  # nothing is known yet
    pace.rates = {"dense": 0.03, "sparse": 0.05}
    assert pace.plan(100, 60.0, 0.5)
    passed = 60.0 + 0.03 * (pace.steps / 2 - 100) + 0.05 * pace.steps / 2
    assert passed == pytest.approx(400, abs=0.1)
    pace.rates["sparse"] = 0.1
    assert pace.plan(6000, 300.0, 0.5)
    assert pace.steps == 7000
    pace.rates["sparse"] = 0.01
    assert pace.plan(6500, 300.0, 0.5)
    assert pace.steps == 10_000
    assert pace.plan(9000, 500.0, 0.5)
    assert pace.steps == 9001
    assert not Pace(10_000).plan(100, 1e9, 0.5)


class Device:
    """Stands for a GPU: a graph runs what it has captured, and either half may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stance, self.captures, self.broken = "default", 0, ""
        for name in ("Stream", "current_stream", "stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        monkeypatch.setattr(torch.cuda, "graph", self.captured)
        monkeypatch.setattr(
            torch.compiler, "set_stance", lambda name: setattr(self, "stance", name)
        )

    @contextmanager
    def captured(self, graph: MagicMock) -> Iterator[None]:
        self.captures += 1
        if self.broken == "capture":
            raise RuntimeError("not permitted when stream is capturing")
        yield

    def forward(self) -> None:
        if self.broken == "compiler" and self.stance == "default":
            raise ArithmeticError("PassManager::run failed")


@pytest.mark.parametrize("broken", ["", "compiler", "capture"])
def test_what_fails_on_a_gpu_is_done_without(
    broken: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.make_data(work, 2 * STEPS, BUILTIN_MODELS["witness-v3"].path)
    run = train.Training(work, NAME, device="cpu")
    device = Device(monkeypatch)
    device.broken = broken
    one = DenseStep(run, Pace(STEPS))
    one.on_gpu = one.captures = True
    one.restart()
    outputs = one.outputs
    monkeypatch.setattr(one, "outputs", lambda: (device.forward(), outputs())[1])
    for step in range(6):
        one(step)
    assert device.stance == ("force_eager" if broken == "compiler" else "default")
    assert device.captures == 1
    told = [row["without"] for row in run.log if "without" in row]
    assert told == ([broken] if broken else [])
    assert one.captures == (broken != "capture")


def test_what_fails_twice_ends_the_training(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.make_data(work, 2 * STEPS, BUILTIN_MODELS["witness-v3"].path)
    one = DenseStep(train.Training(work, NAME, device="cpu"), Pace(STEPS))
    one.on_gpu, one.compiles = True, 3
    monkeypatch.setattr(one, "_on_side_stream", MagicMock(side_effect=RuntimeError("no memory")))
    monkeypatch.setattr(torch.compiler, "set_stance", MagicMock())
    with pytest.raises(RuntimeError, match="no memory"):
        one(0)
