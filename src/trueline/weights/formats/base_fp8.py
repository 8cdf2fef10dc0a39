"""Block fp8 throughout, as the Base checkpoints of DeepSeek-V4 are published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trueline.spec.fields import Fields
from trueline.weights.checkpoint import StoredTensor
from trueline.weights.formats.block_fp8 import BlockFp8, read_as
from trueline.weights.formats.fp4 import DTYPES as FP4_DTYPES


@dataclass(frozen=True, kw_only=True)
class BaseFp8(BlockFp8):
    """W = weight × scale of its block, in float32."""

    scale_name = "scale"
    scale_dtypes = ("F32",)

    def problem(self, shape: tuple[int, ...], tensors: Sequence[StoredTensor]) -> str | None:
        weight, scale = tensors
        if weight.dtype in FP4_DTYPES:
            return f"{weight}: packed fp4, while config.json says expert_dtype fp8"
        if scale.dtype == "F8_E8M0":
            return f"{scale}: as beside fp4 experts, while config.json says expert_dtype fp8"
        return super().problem(shape, tensors)


def read(section: Fields) -> BaseFp8:
    """Of `quantization_config` with quant_method fp8 where expert_dtype is fp8."""
    return read_as(BaseFp8, section)
