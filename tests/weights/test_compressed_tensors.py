"""int4 packs against the public package that defines them: the same words, the same numbers, the
same modules left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trueline.tiny.quantise import KIMI_IGNORES, quantise
from trueline.verify.cases import INT4
from trueline.weights.formats.pack_int4 import Int4Stored, PackInt4

Tiny = Callable[..., Path]


class Package:
    """What is asked of compressed-tensors, imported when it is: that takes seconds."""

    def __init__(self) -> None:
        from compressed_tensors import quantization
        from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
        from compressed_tensors.utils.match import is_match

        self._quantization, self._packer = quantization, PackedQuantizationCompressor
        self._is_match = is_match

    def _scheme(self, group: int) -> Any:
        weights = self._quantization.QuantizationArgs(
            num_bits=4, type="int", strategy="group", group_size=group
        )
        return self._quantization.QuantizationScheme(targets=["Linear"], weights=weights)

    def pack(self, weight: Tensor, scale: Tensor, group: int) -> dict[str, Tensor]:
        stored = {"weight": weight, "weight_scale": scale}
        packed: dict[str, Tensor] = self._packer.compress(stored, self._scheme(group))
        return packed

    def unpack(self, packed: Tensor, scale: Tensor, shape: Tensor, group: int) -> Tensor:
        stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
        weight: Tensor = self._packer.decompress(stored, self._scheme(group))["weight"]
        return weight

    def read(self, section: dict[str, Any]) -> Any:
        return self._quantization.QuantizationConfig.model_validate(section)

    def quantises(self, module: str, ignore: list[str]) -> bool:
        """Whether it takes a linear layer of this name."""
        return bool(self._is_match(module, torch.nn.Linear(1, 1), "Linear", ignore))


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


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
def test_words_and_numbers(group: int, columns: int, dtype: torch.dtype, package: Package) -> None:
    value = adversarial(5, columns, group).to(dtype).float()
    fmt = PackInt4(group=group, ignored_modules=())
    packed, scale, shape = quantise(value, fmt, dtype)
    theirs = package.pack(value, scale.float(), group)
    assert torch.equal(packed, theirs["weight_packed"])
    assert torch.equal(shape, theirs["weight_shape"])
    assert shape.dtype == theirs["weight_shape"].dtype
    ours = Int4Stored(packed, scale, group, columns).dequantise()
    assert torch.equal(ours, package.unpack(packed, scale.float(), shape, group))
    narrow = package.unpack(packed, scale, shape, group)  # rounds to the dtype of its scales
    assert narrow.dtype == dtype
    assert torch.equal(ours.to(dtype), narrow)


def test_every_word(package: Package) -> None:
    """Whatever bits a word has."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(-(2**31), 2**31, (64, 24), generator=generator).int()
    packed[0, :16] = torch.tensor([n * 0x11111111 - (2**32 if n > 7 else 0) for n in range(16)])
    scale = torch.rand(64, 6, generator=generator) + 0.5
    theirs = package.unpack(packed, scale, torch.tensor([64, 192]), 32)
    assert torch.equal(Int4Stored(packed, scale, 32, 192).dequantise(), theirs)


def test_partial_groups_are_not_packed(package: Package) -> None:
    with pytest.raises(ValueError, match="group_size 32"):
        package.pack(torch.ones(2, 80), torch.ones(2, 3), 32)


def test_the_config_is_one_that_the_package_reads(tiny: Tiny, package: Package) -> None:

    keys = {"hidden_size": 96, "moe_intermediate_size": 64}
    model = tiny("kimi_k2", keys=keys, storage=INT4)
    section = json.loads((model / "config.json").read_text())["quantization_config"]
    config = package.read(section)
    assert config.config_groups["group_0"].weights.group_size == 32
    assert config.format == "pack-quantized"
    stored = load_file(model / "model.safetensors")
    packed = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_packed")}
    others = {name.rpartition(".")[0] for name in stored if name.endswith("_proj.weight")}
    for module in packed | others | {"lm_head"}:
        assert package.quantises(module, config.ignore) == (module in packed)


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
def test_the_same_modules_are_ignored(entry: str, package: Package) -> None:
    ours = PackInt4(group=32, ignored_modules=(entry,))
    for module in MODULES:
        assert ours.exempts(f"{module}.weight") != package.quantises(module, [entry])
