"""Block fp8 throughout, as the Base checkpoints of DeepSeek-V4 are published."""

from __future__ import annotations

from dataclasses import dataclass

from trueline.spec.fields import Fields
from trueline.weights.formats.block_fp8 import BlockFp8, read_as


@dataclass(frozen=True, kw_only=True)
class BaseFp8(BlockFp8):
    """W = weight × scale of its block, in float32."""

    scale_name = "scale"
    scale_dtypes = ("F32",)


def read(section: Fields) -> BaseFp8:
    """Of `quantization_config` with quant_method fp8 where expert_dtype is fp8."""
    return read_as(BaseFp8, section)
