"""How `reference/` reads checkpoints: names, fused experts, shards, block fp8."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf
from hf import FLOAT64_GATE, TOKENS, Case, Checkpoints, T, distance
from trueline import reference
from trueline.errors import CheckpointError
from trueline.reference import quantised, weights

V2, V3 = Case("deepseek_v2"), Case("deepseek_v3")


def rewrite(source: Path, target: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    target.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", target / "config.json")
    tensors = load_file(source / "model.safetensors")
    changed = change(tensors)
    save_file(tensors if changed is None else changed, target / "model.safetensors")
    return target


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = reference.load(left).params, reference.load(right).params
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def fuse(tensors: dict[str, Tensor]) -> None:
    for layer in range(1, hf.LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        parts = [
            [tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in range(hf.EXPERTS)]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors[f"{at}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{at}.down_proj"] = down


def test_fused_experts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints(V3).path
    assert_same_weights(rewrite(source, tmp_path, fuse), source)


def test_names_of_kimi_k25(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """As published, as saved by transformers, as in memory: one set of weights."""
    checkpoint = checkpoints(Case("kimi_k25"))
    saved = load_file(checkpoint.path / "model.safetensors")
    assert any(name.startswith("language_model.model.blocks.0.") for name in saved)

    def publish(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
            for name, tensor in tensors.items()
        }

    def in_memory(_: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(checkpoint.model.float().state_dict())

    for change in (publish, in_memory):
        assert_same_weights(rewrite(checkpoint.path, tmp_path, change), checkpoint.path)


def test_shards(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints(V3)
    checkpoint.model.float().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_weights(tmp_path, checkpoint.path)


def test_foreign_tensors_are_skipped_and_unknown_ones_refused(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoints(V3).path

    def add(*names: str) -> Path:
        return rewrite(source, tmp_path, lambda t: t | {name: torch.ones(2) for name in names})

    known = add(
        f"model.layers.{hf.LAYERS}.enorm.weight",
        f"model.layers.{hf.LAYERS}.mlp.experts.0.gate_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.patch_embed.proj.weight",
        "mm_projector.proj.0.weight",
    )
    assert_same_weights(known, source)
    for name in ("model.layers.0.self_attn.q_a_proj.bias", "model.layers.1.mlp.gate.bias"):
        with pytest.raises(CheckpointError, match=name):
            reference.load(add(name))


def test_tied_head_is_the_embedding(checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoint = checkpoints(replace(V3, tied=True))
    assert "lm_head.weight" not in load_file(checkpoint.path / "model.safetensors")
    oracle = reference.load(checkpoint.path)
    ours = oracle.logprobs(TOKENS)
    theirs = checkpoint.logprobs(TOKENS, torch.arange(T), torch.float64)
    assert distance(ours, theirs) <= FLOAT64_GATE
    other = {"lm_head.weight": torch.zeros(hf.VOCAB, hf.D)}
    with pytest.raises(CheckpointError, match="lm_head"):
        reference.load(rewrite(checkpoint.path, tmp_path, lambda t: t | other))


def test_bfloat16_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    stored: dict[str, Tensor] = {}

    def shorten(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
        return stored

    path = rewrite(checkpoints(V3).path, tmp_path, shorten)
    for name, tensor in reference.load(path).params.items():
        assert torch.equal(tensor, stored[name].double())


def quantise(weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> list[Tensor]:
    """[fp8 weight, scales], a block at a time, edge blocks partial."""
    rows, columns = block
    out, inner = weight.shape
    scales = torch.zeros(-(-out // rows), -(-inner // columns))
    stored = torch.zeros_like(weight)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            part = (slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            scale = weight[part].abs().max() / 448
            if scale_dtype == torch.float8_e8m0fnu:
                scale = torch.exp2(scale.log2().ceil())
            scales[r, c] = scale
            stored[part] = weight[part] / scale
    return [stored.to(torch.float8_e4m3fn), scales.to(scale_dtype)]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(16, 12), (128, 128)])
def test_block_fp8_checkpoint(
    block: tuple[int, int], scale_dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Against a loop over elements; 17 rows a head, so blocks of 16 cut through heads."""
    assert (hf.P + hf.V) % 16 != 0
    stored: dict[str, Tensor] = {}

    def shorten(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") or "kv_a_proj" in name:
                pair = quantise(tensor, block, scale_dtype)
                stored.update(zip((name, f"{name}_scale_inv"), pair, strict=True))
            else:
                stored[name] = tensor
        return stored

    path = rewrite(checkpoints(V3).path, tmp_path, shorten)
    section = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    hf.edit_config(path, quantization_config=section)
    params = reference.load(path).params
    assert len(params) == sum(not name.endswith("_scale_inv") for name in stored)
    for name, tensor in params.items():
        if f"{name}_scale_inv" not in stored:
            assert torch.equal(tensor, stored[name].double())
        elif "layers.0" in name or "experts.3" in name:
            assert torch.equal(tensor, dequantise_slowly(stored, name, block))
    unquantised = reference.load(checkpoints(V3).path)
    worst = max((params[n] - unquantised.params[n]).abs().max().item() for n in params)
    assert 0 < worst < 0.2
    hf.edit_config(path, quantization_config=None)
    with pytest.raises(CheckpointError, match="float8"):
        reference.load(path)


def dequantise_slowly(stored: dict[str, Tensor], name: str, block: tuple[int, int]) -> Tensor:
    weight, scale = stored[name].float(), stored[f"{name}_scale_inv"].float()
    result = torch.zeros(weight.shape, dtype=torch.float32)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            result[o, i] = weight[o, i] * scale[o // block[0], i // block[1]]
    return result.double()


def test_published_block_size_with_partial_edges() -> None:
    weight = torch.randn(261, 150, generator=torch.Generator().manual_seed(4))
    stored, scales = quantise(weight, (128, 128), torch.float32)
    assert scales.shape == (3, 2)
    scales[2, 1] = 3.0  # five rows, 22 columns
    result = weights.dequantise(stored, scales, (128, 128))
    assert torch.equal(result[256:, 128:], stored.float()[256:, 128:] * 3.0)
    assert torch.equal(result[:128, 128:], stored.float()[:128, 128:] * scales[0, 1])
    assert (result - weight)[:256].abs().max() < 0.2
    with pytest.raises(CheckpointError, match="scales"):
        weights.dequantise(stored, scales.T, (128, 128))


def test_packed_numbers_one_by_one() -> None:
    """By the words of the formats' definitions: shifts and tables, not halves and exponents."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(-(2**31), 2**31, (4, 8), generator=generator).int()
    scale = torch.rand(4, 2, generator=generator).bfloat16()
    numbers = quantised.int4(words, scale, torch.tensor([4, 64]), 32)
    codes = torch.randint(0, 256, (4, 32), generator=generator).to(torch.uint8)
    powers = torch.randint(100, 150, (4, 2), generator=generator).to(torch.uint8)
    small = quantised.fp4(codes.view(torch.int8), powers.view(torch.float8_e8m0fnu))
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for o in range(4):
        for i in range(64):
            nibble = int(words[o, i // 8]) >> 4 * (i % 8) & 15
            assert numbers[o, i] == (nibble - 8) * scale[o, i // 32].float()
            code = int(codes[o, i // 2]) >> 4 * (i % 2) & 15
            sign = -1 if code > 7 else 1
            assert small[o, i] == sign * table[code % 8] * 2.0 ** (int(powers[o, i // 32]) - 127)
    with pytest.raises(CheckpointError, match="packs"):
        quantised.int4(words, scale, torch.tensor([64, 4]), 32)
    with pytest.raises(CheckpointError, match="scales"):
        quantised.fp4(codes, powers.T)
