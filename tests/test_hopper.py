"""CI has no GPU, but a compiler for one: every kernel that the benchmark's models launch compiles
for a Hopper GPU, fits its shared memory, and its machine code reads nothing that nobody wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trueline.verify.machine_code import main

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "bench" / "configs"
ALL = {
    *("attend_paired", "merge", "deal", "gather", "join", "write_token", "norm_rows", "stream"),
    *("product", "choose", "gated", "place", "count", "grouped", "combine", "gate"),
    *("best", "mass", "noisy", "settle"),
}
# Fewer layers and experts, and hardly any words: the same shapes of everything else.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "v2lite": ({"num_hidden_layers": 2, "n_routed_experts": 16}, {"attend", "down"}),
    "ling25s": (
        {"num_hidden_layers": 5, "num_experts": 32},
        {"attend", "down_at_once", "decode_step", "walk", "scan", "prepare_heads", "norm_groups"},
    ),
    "v32s": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        {"down", "write", "turn", "scores", "select", "look_up", "set_bits"},
    ),
}


# The others have v2lite's kernels, for other sizes.
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "v2lite" else ()) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_compiles(name: str, tmp_path: Path) -> None:
    keys, own = MODELS[name]
    config = json.loads((CONFIGS / name / "config.json").read_text()) | keys
    config |= {"vocab_size": 4096} | {key: 0 for key in config if key.endswith("_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "hopper.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout)) == ALL | own
    assert main(tmp_path / "kernels") == 0
