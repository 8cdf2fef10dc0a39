"""The ranks together hold every stored byte as often as its placement says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import rank_grid
from spread import pairwise
from trueline.models import read_model
from trueline.spec.shard import local_spec
from trueline.tiny.configs import FAMILIES
from trueline.verify.rank_ledger import ranks_hold_every_byte
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.rank_ledger import HeldTensor, held_slices

Tiny = Callable[..., Path]
BOTH = (False, True)


@pytest.mark.parametrize(
    ("family", "stored", "size", "expert_parallel", "invariant_sums"),
    pairwise(FAMILIES, rank_grid.STORED, rank_grid.SIZES, BOTH, BOTH),
)
def test_ranks_hold_every_byte(
    family: str, stored: str, size: int, expert_parallel: bool, invariant_sums: bool, tiny: Tiny
) -> None:
    model = rank_grid.make(tiny, family, stored)
    ranks_hold_every_byte(model, size, invariant_sums, expert_parallel)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5"])
def test_replicated_heads_are_held_by_all(family: str, size: int, tiny: Tiny) -> None:
    model = rank_grid.make(tiny, family, "block fp8", num_attention_heads=2)
    for invariant_sums in BOTH:
        ranks_hold_every_byte(model, size, invariant_sums, False)


def stored_bytes(part: HeldTensor) -> bytes:
    with safe_open(part.tensor.file, "pt") as file:
        taken: Tensor = file.get_tensor(part.tensor.name)[part.slices]
    return taken.contiguous().view(torch.uint8).numpy().tobytes()


def test_slices_of_a_rank(tiny: Tiny) -> None:
    """Names, files and byte ranges, from headers alone: an expert's columns 10 to 15 of 40."""
    model = rank_grid.make(tiny, "kimi_k2", "int4 of all")
    checkpoint, spec = open_checkpoint(model), read_model(model)
    assert checkpoint is not None
    held = {each.weight: each for each in held_slices(checkpoint, local_spec(spec, 2, 8))}
    down = held["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert down.parameter == "model.layers.1.mlp.experts.down_proj"
    assert down.cut == (slice(0, 80), slice(10, 15))
    packed, scales, shape = down.tensors
    assert packed.slices == (slice(0, 80), slice(1, 2))  # of 5 words in a row, the second
    assert scales.slices == (slice(0, 80), slice(1, 2))
    assert packed.tensor.file == model / "model.safetensors"
    begin = packed.tensor.begin
    ranges = list(packed.byte_ranges())
    assert ranges[:2] == [(begin + 4, begin + 8), (begin + 24, begin + 28)]
    assert (len(ranges), packed.nbytes) == (80, 320)
    assert list(shape.byte_ranges()) == [(shape.tensor.begin, shape.tensor.end)]
    for each in held.values():  # the bytes are those of the slices
        for part in each.tensors:
            raw = part.tensor.file.read_bytes()
            mine = b"".join(raw[begin:end] for begin, end in part.byte_ranges())
            assert mine == stored_bytes(part)
    gate = held["model.layers.1.mlp.experts.3.gate_proj.weight"].tensors[0]
    rows = 10 * gate.tensor.nbytes // 40, 15 * gate.tensor.nbytes // 40
    assert list(gate.byte_ranges()) == [tuple(gate.tensor.begin + at for at in rows)]
