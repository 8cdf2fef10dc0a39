"""int4 packs against the public package that defines them: the same words, the same numbers, the
same modules left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match
from safetensors.torch import load_file
from torch import Tensor

from trueline.tiny.quantise import KIMI_IGNORES, quantise
from trueline.verify.cases import INT4
from trueline.weights.formats.pack_int4 import Int4Stored, PackInt4

Tiny = Callable[..., Path]


def scheme(group: int) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def adversarial(rows: int, columns: int, group: int) -> Tensor:
    """Scales over twelve powers of two, a group of zeros, one number alone in a group, ends of the
    range."""
    generator = torch.Generator().manual_seed(columns + group)
    value = torch.randn(rows, columns // group, group, generator=generator)
    value *= 2.0 ** torch.randint(-6, 7, (rows, columns // group, 1), generator=generator)
    value[0, 0] = 0
    value[1, -1] = 0
    value[1, -1, group // 2] = -3.0
    value[2, 0, :2] = torch.tensor([4.0, -4.0])
    return value.flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "columns"), [(32, 96), (128, 384), (8, 40)])
def test_words_and_numbers(group: int, columns: int, dtype: torch.dtype) -> None:
    value = adversarial(5, columns, group).to(dtype).float()
    fmt = PackInt4(group=group, ignored_modules=())
    packed, scale, shape = quantise(value, fmt, dtype)
    theirs = PackedQuantizationCompressor.compress(
        {"weight": value, "weight_scale": scale.float()}, scheme(group)
    )
    assert torch.equal(packed, theirs["weight_packed"])
    assert torch.equal(shape, theirs["weight_shape"])
    assert shape.dtype == theirs["weight_shape"].dtype
    ours = Int4Stored(packed, scale, group, columns).dequantise()
    stored = {"weight_packed": packed, "weight_scale": scale.float(), "weight_shape": shape}
    numbers = PackedQuantizationCompressor.decompress(stored, scheme(group))["weight"]
    assert torch.equal(ours, numbers)
    narrow = stored | {"weight_scale": scale}  # in the dtype of its scales: one rounding of ours
    numbers = PackedQuantizationCompressor.decompress(narrow, scheme(group))["weight"]
    assert numbers.dtype == dtype
    assert torch.equal(ours.to(dtype), numbers)


def test_every_word() -> None:
    """Whatever bits a word has."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(-(2**31), 2**31, (64, 24), generator=generator).int()
    packed[0, :16] = torch.tensor([n * 0x11111111 - (2**32 if n > 7 else 0) for n in range(16)])
    scale = torch.rand(64, 6, generator=generator) + 0.5
    stored = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor([64, 192]),
    }
    theirs = PackedQuantizationCompressor.decompress(stored, scheme(32))["weight"]
    assert torch.equal(Int4Stored(packed, scale, 32, 192).dequantise(), theirs)


def test_partial_groups_are_not_packed() -> None:
    with pytest.raises(ValueError, match="group_size 32"):
        PackedQuantizationCompressor.compress(
            {"weight": torch.ones(2, 80), "weight_scale": torch.ones(2, 3)}, scheme(32)
        )


def test_the_config_is_one_that_the_package_reads(tiny: Tiny) -> None:

    keys = {"hidden_size": 96, "moe_intermediate_size": 64}
    model = tiny("kimi_k2", keys=keys, storage=INT4)
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(section)
    assert config.config_groups["group_0"].weights.group_size == 32
    assert config.format == "pack-quantized"
    stored = load_file(model / "model.safetensors")
    packed = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_packed")}
    others = {name.rpartition(".")[0] for name in stored if name.endswith("_proj.weight")}
    linear = torch.nn.Linear(1, 1)
    for module in packed | others | {"lm_head"}:
        assert is_match(module, linear, "Linear", config.ignore) == (module in packed)


ENTRIES = (
    *KIMI_IGNORES,
    "model.layers.1",
    "model.layers.1.mlp.experts.1.up_proj",
    "re:model.layers.1",
    "re:layers.1",
    "re:.*up_proj$",
    "up_proj",
    "Linear",
)
MODULES = (
    *("lm_head", "model.layers.1.self_attn.o_proj", "model.layers.11.self_attn.q_b_proj"),
    *(f"model.layers.{n}.mlp.experts.{m}.up_proj" for n in (1, 2, 10) for m in (1, 11)),
    *("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.shared_experts.down_proj"),
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_same_modules_are_ignored(entry: str) -> None:
    ours = PackInt4(group=32, ignored_modules=(entry,))
    linear = torch.nn.Linear(1, 1)
    for module in MODULES:
        assert ours.exempts(f"{module}.weight") != is_match(module, linear, "Linear", [entry])
