"""Weights as each format publishes them: a tiny checkpoint's numbers, quantised and packed, and the
`quantization_config` that says so."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trueline.errors import UsageError
from trueline.utils.json_types import JSON
from trueline.weights.formats import Format, Storage, Stored
from trueline.weights.formats.base_fp8 import BaseFp8
from trueline.weights.formats.block_fp8 import BlockFp8, Fp8Stored
from trueline.weights.formats.fp4 import CODES, GROUP, E8m0BlockFp8, Fp4, Fp4Experts, Fp4Stored
from trueline.weights.formats.pack_int4 import WORD, Int4Stored, PackInt4

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 2.0**-100
"""The least scale: of a block of zeros."""
KIMI_IGNORES = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
"""As Kimi-K2-Thinking and K2.5 are published: only routed experts are int4."""


def published_storage(
    name: str, block: int = 128, power_of_two_scales: bool = False, group: int = 32
) -> Storage:
    """block-fp8, base-fp8, int4 or fp4, with what their published checkpoints leave plain."""
    sides = (block, block)
    if name == "base-fp8":
        return BaseFp8(block=sides, power_of_two_scales=power_of_two_scales, ignored_modules=())
    if name == "block-fp8":
        return BlockFp8(block=sides, power_of_two_scales=power_of_two_scales, ignored_modules=())
    if name == "int4":
        return PackInt4(group=group, ignored_modules=KIMI_IGNORES)
    assert name == "fp4", name
    others = E8m0BlockFp8(block=sides, power_of_two_scales=True, ignored_modules=())
    return Fp4Experts(routed=Fp4(ignored_modules=()), others=others)


def quantization_config(storage: Storage) -> JSON:
    """As the format's published checkpoints have it."""
    if isinstance(storage, PackInt4):
        return _pack_quantized(storage)
    if isinstance(storage, Fp4Experts):
        return _fp8(storage.others) | {"expert_dtype": "fp4"}
    if isinstance(storage, BaseFp8):
        return _fp8(storage) | {"expert_dtype": "fp8"}
    if isinstance(storage, BlockFp8):
        return _fp8(storage)
    raise UsageError(f"{storage.label}: tiny checkpoints have block fp8, int4 and fp4 experts")


def _fp8(storage: BlockFp8) -> JSON:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(storage.block),
        **({"scale_fmt": "ue8m0"} if storage.power_of_two_scales else {}),
        **({"modules_to_not_convert": list(m)} if (m := storage.ignored_modules) else {}),
    }


def _pack_quantized(storage: PackInt4) -> JSON:
    weights: JSON = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": storage.group,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(storage.ignored_modules),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def quantise(value: Tensor, fmt: Format, plain: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of `fmt.names`; scales that are no powers of two are stored in `plain`."""
    if isinstance(fmt, PackInt4):
        return _int4(value, fmt.group, plain)
    if isinstance(fmt, Fp4):
        return _fp4(value)
    assert isinstance(fmt, BlockFp8), fmt.label
    return _block_fp8(value, fmt)


def file_tensors(stored: Stored, fmt: Format) -> tuple[Tensor, ...]:
    """Of a whole matrix, those that `names` of its format has, as a file holds them."""
    if isinstance(stored, Int4Stored):
        return stored.packed, stored.scales, torch.tensor(stored.shape)
    if isinstance(stored, Fp4Stored):
        return stored.packed.view(torch.int8), stored.scales.view(torch.float8_e8m0fnu)
    assert isinstance(stored, Fp8Stored), stored
    assert isinstance(fmt, BlockFp8), fmt.label
    return stored.numbers, stored.scales.to(torch.float8_e8m0fnu) if _in_e8m0(
        fmt
    ) else stored.scales


def _in_e8m0(fmt: BlockFp8) -> bool:
    return "F32" not in fmt.scale_dtypes


def _block_fp8(value: Tensor, fmt: BlockFp8) -> tuple[Tensor, Tensor]:
    """scale = amax / 448 of each block, or the next power of two."""
    rows, columns = fmt.block
    height, width = value.shape
    padded = torch.nn.functional.pad(value, (0, -width % columns, 0, -height % rows))
    tall, wide = padded.shape[0] // rows, padded.shape[1] // columns
    blocks = padded.reshape(tall, rows, wide, columns)
    scale = (blocks.abs().amax(dim=(1, 3)) / FP8_MAX).clamp_min(SMALLEST)
    e8m0 = _in_e8m0(fmt)
    if fmt.power_of_two_scales or e8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    numbers = quantised.reshape(padded.shape)[:height, :width].contiguous()
    return numbers, scale.to(torch.float8_e8m0fnu) if e8m0 else scale


def _int4(value: Tensor, group: int, plain: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """scale = amax / 7.5 of each group, as the compressed-tensors package has it."""
    groups = _groups(value, group)
    scale = (groups.abs().amax(dim=-1) / 7.5).clamp_min(torch.finfo(plain).tiny).to(plain)
    numbers = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    nibbles = (numbers + 8).to(torch.int64).reshape(len(value), -1, WORD)
    words = (nibbles << torch.arange(0, 4 * WORD, 4)).sum(-1)
    return words.to(torch.int32), scale, torch.tensor(value.shape)


def _fp4(value: Tensor) -> tuple[Tensor, Tensor]:
    """scale = the power of two from amax / 6 up; numbers to the nearest code."""
    groups = _groups(value, GROUP)
    exponents = torch.ceil(torch.log2((groups.abs().amax(dim=-1) / CODES[-1]).clamp_min(SMALLEST)))
    scaled = groups / torch.exp2(exponents)[..., None]
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(CODES)])
    codes = torch.bucketize(scaled.abs(), middles) + 8 * scaled.signbit()
    pairs = codes.to(torch.uint8).reshape(len(value), -1, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed.view(torch.int8), (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _groups(value: Tensor, group: int) -> Tensor:
    if value.shape[1] % group:
        raise UsageError(f"{value.shape[1]} columns: accepted: whole groups of {group}")
    return value.reshape(len(value), -1, group)
