"""Numerics `published`: what the authors' inference code of DeepSeek V4 rounds so that the model
meets what it was trained with. A stored key is rounded to bfloat16, and then its channels that do
not rotate go through e4m3; index queries and keys go through a Hadamard matrix and then e2m1. All
scales are powers of two. Nothing else differs from numerics `weights`."""

import torch
from torch import Tensor

from trueline.errors import ConfigError
from trueline.reference.functional import Params, power_of_two_above, through_fp8, wide

KEY_GROUP, INDEX_GROUP = 64, 32
LARGEST_E2M1 = 6.0
FLOOR_E2M1 = 6 * 2.0**-126
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code


class Published(Params):
    """Weights under these numerics."""


def stored_key(params: Params, row: Tensor, rotated: int) -> Tensor:
    """A key of the window or a compressed entry [..., d], behind its rotation."""
    if not isinstance(params, Published):
        return row
    short = row.to(torch.bfloat16).to(row.dtype)
    plain = row.shape[-1] - rotated
    coded = through_fp8(short[..., :plain], powers_of_two=True, size=KEY_GROUP)
    return torch.cat((coded, short[..., plain:]), dim=-1)


def index_row(params: Params, row: Tensor) -> Tensor:
    """An index query or key [..., d], behind its rotation; stored as bfloat16 before and after the
    Hadamard matrix."""
    if not isinstance(params, Published):
        return row
    size = row.shape[-1]
    short = wide(row.to(torch.bfloat16).to(row.dtype))
    turned = (short @ hadamard(size).to(short.dtype) * size**-0.5).to(torch.bfloat16)
    return through_e2m1(turned.to(row.dtype))


def hadamard(size: int) -> Tensor:
    """[size, size] of ±1, in Sylvester's order."""
    if size & (size - 1):
        raise ConfigError(
            f"config.json: index_head_dim={size}; numerics 'published' has a Hadamard matrix of "
            "that size: a power of two"
        )
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def through_e2m1(x: Tensor) -> Tensor:
    """Groups of 32 channels, the last one what is left of them: code * scale, with scale = amax / 6
    or the next power of two."""
    groups = []
    for group in torch.split(x, INDEX_GROUP, dim=-1):
        y = wide(group)
        largest = y.abs().amax(-1, keepdim=True).clamp_min(FLOOR_E2M1)
        scale = power_of_two_above(largest / LARGEST_E2M1)
        groups.append((nearest_e2m1(y / scale) * scale).to(x.dtype))
    return torch.cat(groups, dim=-1)


def nearest_e2m1(x: Tensor) -> Tensor:
    """Half-way between two codes, the even one."""
    values = torch.tensor(E2M1, dtype=x.dtype)
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs().contiguous()
    # behind a middle, or on one that lies above an odd code
    code = torch.bucketize(size, middles)
    tied = torch.isin(size, middles[1::2])
    return values[code + tied.long()] * x.sign()
