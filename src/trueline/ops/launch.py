"""What implementations for a GPU share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from trueline.device import META, interpreting, send

# What the interpreter takes for the machine: enough to split work, few enough to interpret it.
INTERPRETED_SMS = 12
KNOWN_MULTIPLE = 16
"""Kernels are compiled apart for pointers to multiples of so many bytes, and for strides that are
multiples of so many numbers; of others Triton knows nothing."""
INT32_MULTIPLE = KNOWN_MULTIPLE // 4


def power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def num_sms(device: torch.device) -> int:
    if interpreting():
        return INTERPRETED_SMS
    on = None if device.type == META else device  # of a dry run: the GPU it is for
    return torch.cuda.get_device_properties(on).multi_processor_count


def copied(columns: Iterable[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int32 columns on a device, in one copy that the host does not wait for. Each begins where
    kernels are compiled for: at a KNOWN_MULTIPLE of bytes."""
    columns = list(columns)
    numbers: list[int] = []
    starts: list[int] = []
    for column in columns:
        starts.append(len(numbers))
        numbers += column
        numbers += [0] * (-len(column) % INT32_MULTIPLE)
    there = send(torch.tensor(numbers, dtype=torch.int32, device="cpu"), device)
    return [
        there[start : start + len(column)] for start, column in zip(starts, columns, strict=True)
    ]


def can_copy(*tensors: Tensor) -> bool:
    """Whether a kernel over them copies rows into shared memory without their passing through
    registers: in pieces that it knows to be whole."""
    return not any(n % KNOWN_MULTIPLE for x in tensors for n in (x.data_ptr(), *x.stride()[:-1]))


def unit_stride(x: Tensor) -> Tensor:
    """Kernels walk the last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()
