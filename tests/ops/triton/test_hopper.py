"""CI has no GPU, but a compiler for one: every kernel that the benchmark's models launch compiles
for a Hopper GPU, fits its shared memory, and its machine code reads nothing that nobody wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import pytest

from bench_configs import write_config
from paths import HELPERS
from trueline.verify.machine_code import disassembled, main, unset_reads

ALL = {
    *("merge", "join", "norm_rows", "stream"),
    *("split_gemm", "choose", "place", "count", "combine"),
    *("best", "mass", "noisy", "settle"),
}
LATENT = {"attend_warp_specialised", "schedule_splits", "gather", "write_token"}
FEW_WORDS = {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MLP = {"gate", "gated"}
# Fewer layers and experts, and hardly any words: the same shapes of everything else.
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "v2lite": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        LATENT | MLP | {"attend", "down", "grouped"},
    ),
    "ling25s": (
        {"num_hidden_layers": 5, "num_experts": 32},
        LATENT
        | MLP
        | {"attend", "down_at_once", "grouped", "decode_step", "walk", "scan", "prepare_heads"}
        | {"norm_groups"},
    ),
    "k25s": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        LATENT
        | MLP
        | {"down", "down_at_once", "stream_fragments", "grouped_gemm", "permute_columns"},
    ),
    "v32s-fp8": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        LATENT
        | {"write", "rotate", "scores", "select", "look_up", "set_bits", "gemm", "few", "quantise"}
        | {"few_numbers", "gated", "down"},
    ),
    "v32s": (
        {"num_hidden_layers": 2, "n_routed_experts": 16},
        LATENT
        | MLP
        | {"down", "grouped", "write", "rotate", "scores", "select", "look_up", "set_bits"},
    ),
    "v4s": (
        {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "n_routed_experts": 16}
        | {"num_hash_layers": 1},
        {"write_rows", "prepare_queries", "rotate_rows", "attend", "compress", "scores", "select"}
        | {"project", "read", "few", "few_numbers", "gemm", "quantise", "grouped_product"}
        | {"dequantised"}
        | {"stream_fragments", "grouped_gemm", "permute_columns"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_compiles(name: str, tmp_path: Path) -> None:
    compiles([name], tmp_path)
    assert main(tmp_path / "kernels") == 0


def test_every_kernel_compiles_once(tmp_path: Path) -> None:
    """For the first arguments that it is launched with: of the models that have most kernels of
    their own for a Hopper GPU."""
    compiles(["k25s", "v32s-fp8"], tmp_path, "--once", "--ptx")
    # assembling and disassembling take as long as compiling: only those with MMAs, where reads
    # of what nobody wrote were seen
    multiply = [
        kernel
        for kernel in tmp_path.rglob("*.cubin")
        if "wgmma.mma" in kernel.with_suffix(".ptx").read_text()
    ]
    assert len(multiply) >= 4
    for kernel in multiply:
        assert not unset_reads(disassembled(kernel)), kernel


@pytest.mark.slow
def test_latents_in_fp8_compile(tmp_path: Path) -> None:
    """The portable kernel of decode takes the place of the warp-specialised one."""
    compiles(["v32s"], tmp_path, "--once", "--fp8-latents", more={"attend"})
    assert main(tmp_path / "kernels") == 0


def compiles(
    names: list[str], tmp_path: Path, *options: str, more: AbstractSet[str] = frozenset()
) -> None:
    for name in names:
        write_config(tmp_path / name, name, MODELS[name][0] | FEW_WORDS)
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(HELPERS / "hopper.py"),
        *options,
        *(str(tmp_path / name) for name in names),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout)) == ALL.union(more, *(MODELS[name][1] for name in names))
