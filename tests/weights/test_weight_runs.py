"""The same weights come out however large tensors are cut, and wherever in a file they begin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trueline.errors import CheckpointError
from trueline.models import read_model
from trueline.spec.shard import local_spec
from trueline.weights import load
from trueline.weights import value as value_module
from trueline.weights.checkpoint import read_header
from trueline.weights.formats.block_fp8 import BlockFp8

Tiny = Callable[..., Path]
BLOCK = BlockFp8(block=(24, 16), power_of_two_scales=False, ignored_modules=())
MODELS: dict[str, dict[str, Any]] = {
    "fp8": {"family": "deepseek_v3", "storage": BLOCK},
    "norm_head": {
        "family": "bailing_moe_v2_5",
        "keys": {"norm_head": True, "moe_intermediate_size": 24},
    },
}


@pytest.mark.parametrize(("what", "ranks"), [("fp8", 1), ("norm_head", 1), ("norm_head", 2)])
def test_runs_of_any_length(
    what: str, ranks: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(MODELS[what])
    model = tiny(options.pop("family"), **options)
    for rank in range(ranks):
        spec = local_spec(read_model(model), rank, ranks)
        whole = load.load_weights(model, spec, dtype=torch.float32)
        for length in (1, 100, 1000):  # numbers: less than a row, some rows, more
            with monkeypatch.context() as patch:
                patch.setattr(load, "CHUNK", length)
                patch.setattr(value_module, "CHUNK", length)
                cut = load.load_weights(model, spec, dtype=torch.float32)
            assert whole.keys() == cut.keys()
            for name, value in whole.items():
                assert torch.equal(cut[name], value), f"{name} in runs of {length}"


@pytest.mark.parametrize("shift", range(1, 8))
def test_tensors_that_begin_anywhere(shift: int, tiny: Tiny, tmp_path: Path) -> None:
    """Most writers fill the header up to eight bytes; the format does not ask for it."""
    model = tiny("deepseek_v3", dtype="bfloat16")
    raw = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shutil.copy(model / "config.json", tmp_path)
    moved = (length + shift).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * shift
    (tmp_path / "model.safetensors").write_bytes(moved + raw[8 + length :])
    spec = read_model(model)
    there, here = (load.load_weights(path, spec, dtype=torch.float32) for path in (model, tmp_path))
    assert there.keys() == here.keys()
    assert all(torch.equal(here[name], value) for name, value in there.items())


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ((8, 12), None),
        ((12, 16), "starts at byte"),
        ((4, 8), "starts at byte"),
        ((8, 16), "4 byte"),
    ],
)
def test_every_byte_has_one_owner(
    second: tuple[int, int], part: str | None, tmp_path: Path
) -> None:
    """No gap, no overlap, no length but that of the numbers; the file ends where the last does."""
    entries = {"a": ([2], (0, 8)), "b": ([1], second)}
    header = json.dumps(
        {n: {"dtype": "F32", "shape": s, "data_offsets": o} for n, (s, o) in entries.items()}
    ).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * max(second[1], 8))
    if part is None:
        assert [tensor.nbytes for tensor in read_header(file)] == [8, 4]
        return
    with pytest.raises(CheckpointError, match=part):
        list(read_header(file))
