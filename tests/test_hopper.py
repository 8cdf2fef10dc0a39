"""CI has no GPU, but a compiler for one: every kernel that the benchmark's models launch compiles
for a Hopper GPU, fits its shared memory, and its machine code reads nothing that nobody wrote."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from trueline.verify.machine_code import main

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "bench" / "configs"
ALL = {
    *("attend", "merge", "deal", "gather", "join", "write_token", "norm_rows", "stream"),
    *("product", "choose", "gated", "place", "count", "grouped", "combine", "gate"),
    *("best", "mass", "noisy", "settle"),
}
# Fewer layers and experts, and hardly any words: the same shapes of everything else.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "v2lite": ({"num_hidden_layers": 2}, {"down"}),
    "ling25s": (
        {"num_hidden_layers": 5, "num_experts": 32},
        {"down_at_once", "decode_step", "walk", "scan", "prepare_heads", "norm_groups"},
    ),
    "v32s": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        {"down", "write", "turn", "scores", "select", "look_up", "set_bits"},
    ),
}


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Popen[str]]]:
    """All at the same time: most of it is waiting for one core."""
    started = {}
    for name, (keys, _) in MODELS.items():
        config = json.loads((CONFIGS / name / "config.json").read_text()) | keys
        config |= {"vocab_size": 4096} | {key: 0 for key in config if key.endswith("_token_id")}
        where = tmp_path_factory.mktemp(name)
        (where / "config.json").write_text(json.dumps(config))
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        env |= {"TRITON_CACHE_DIR": str(where / "kernels"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "hopper.py"), str(where)]
        started[name] = where, Popen(command, env=env, stdout=PIPE, stderr=PIPE, text=True)
    return started


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_compiles(name: str, compiling: dict[str, tuple[Path, Popen[str]]]) -> None:
    where, process = compiling[name]
    told, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    assert set(json.loads(told)) == ALL | MODELS[name][1]
    assert main(where / "kernels") == 0
