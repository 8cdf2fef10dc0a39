"""What `quantization_config` says, and the numbers of packed weights by their definition."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trueline.errors import CheckpointError, ConfigError
from trueline.reference.raw import Raw
from trueline.reference.v4_facts import FAMILY


@dataclass(frozen=True)
class Quantised:
    fp8_block: tuple[int, int] | None = None
    fp4_experts: bool = False  # beside block fp8
    plain_scale_names: bool = False  # scales of fp8 are `<module>.scale`, as those of fp4 are
    int4_group: int | None = None
    powers_of_two: bool = False  # scales of fp8, and so those of fp8 activations


def read_quantised(raw: Raw, top: Raw) -> Quantised:
    """Of the text model or of the whole: a wrapper may state it in either place."""
    section = raw.get("quantization_config") or top.get("quantization_config")
    if section is None:
        return Quantised()
    section = Raw(section)
    method = section["quant_method"]
    if method == "compressed-tensors":
        return Quantised(int4_group=int4_group(section))
    if method != "fp8":
        raise ConfigError(
            f"quant_method '{method}'; the reference reads 'fp8' and 'compressed-tensors'"
        )
    rows, columns = section["weight_block_size"]
    experts = section.get("expert_dtype") or raw.get("expert_dtype") or "fp8"
    if experts not in ("fp8", "fp4"):
        raise ConfigError(f"expert_dtype '{experts}'; the reference reads 'fp8' and 'fp4'")
    fp4 = experts == "fp4"
    return Quantised(
        fp8_block=(rows, columns),
        fp4_experts=fp4,
        plain_scale_names=fp4 or raw["model_type"] == FAMILY,
        powers_of_two=fp4 or section.get("scale_fmt") == "ue8m0",
    )


def int4_group(section: Raw) -> int:
    (scheme,) = section["config_groups"].values()
    weights = Raw(scheme["weights"])
    accepted = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None}
    found = {key: weights.get(key, value) for key, value in accepted.items()}
    if section["format"] != "pack-quantized" or found != accepted:
        raise ConfigError(f"{section['format']}, {found}; the reference reads {accepted}")
    group: int = weights["group_size"]
    return group


def int4(packed: Tensor, scale: Tensor, shape: Tensor, group: int) -> Tensor:
    """Element 2b of a row is the low half of byte b, element 2b + 1 the high half; both are stored
    8 too large. W[o, i] = element * scale[o, i // group] in float32."""
    out, inner = shape.tolist()
    if packed.shape != (out, inner // 8) or scale.shape != (out, inner // group) or inner % group:
        raise CheckpointError(f"packs {tuple(packed.shape)} for a weight of {(out, inner)}")
    elements = halves(packed.contiguous().view(torch.uint8)).float() - 8
    return elements * scale.float().repeat_interleave(group, 1)


def fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Two elements in a byte, the even one low: a sign, two bits of exponent, one of mantissa.
    W[o, i] = element * 2^(scale[o, i // 32] - 127)."""
    codes = halves(packed.view(torch.uint8)).int()
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    small, normal = mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    element = torch.where(exponent == 0, small, normal) * (1 - 2 * sign)
    if scale.shape != (len(codes), codes.shape[1] // 32) or codes.shape[1] % 32:
        raise CheckpointError(f"scales {tuple(scale.shape)} for {tuple(codes.shape)} in 32s")
    power = scale.view(torch.uint8).double() - 127
    return (element.double() * (2.0**power).repeat_interleave(32, 1)).float()


def halves(data: Tensor) -> Tensor:
    return torch.stack((data % 16, data // 16), -1).flatten(1)
