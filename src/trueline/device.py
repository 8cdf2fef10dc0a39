"""What this machine is. The only place that asks."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from trueline.errors import UsageError

LARGE_PAGE = 1 << 21
HOPPER = (9, 0)
GLUON_TRITON = "3.6"
META = "meta"
"""PyTorch's device of tensors without data: shapes, strides and offsets, nothing computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    kind: str
    name: str
    threads: int
    free_memory: int
    total_memory: int
    """Of a GPU; of a CPU, what is free."""
    compute_capability: tuple[int, int] | None = None

    @property
    def torch(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    def shared_by(self, processes: int) -> Device:
        """What each of them has of it."""
        return replace(
            self,
            threads=max(self.threads // processes, 1),
            free_memory=self.free_memory // processes,
            total_memory=self.total_memory // processes,
        )


def find_device(wanted: str) -> Device:
    """The one asked for; for "auto" the GPU where there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device = {wanted!r}: accepted: 'auto', 'cpu' and 'cuda'")
    if wanted != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Device(
            kind="cuda",
            name=name,
            threads=1,
            free_memory=free,
            total_memory=total,
            compute_capability=compute_capability(),
        )
    if wanted == "cuda":
        raise UsageError("device = 'cuda': PyTorch sees no NVIDIA GPU on this machine")
    free = _free_memory()
    # One thread per core: more only makes them wait for each other.
    return Device(
        kind="cpu",
        name=torch.backends.cpu.get_cpu_capability(),
        threads=num_cores(),
        free_memory=free,
        total_memory=free,
    )


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use_gpu(number: int) -> None:
    """From now on, in this process."""
    torch.cuda.set_device(number)


def gpu_number(name: str) -> int:
    """As PyTorch counts them in this process; `name` as CUDA_VISIBLE_DEVICES writes it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(name) if visible else int(name)


def gpu_in_use() -> int:
    return torch.cuda.current_device()


def num_cores() -> int:
    """That we may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return count or 1


def _free_memory() -> int:
    """Bytes that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes() -> int | None:
    """Of this process in host memory, now; None where the system does not tell."""
    return _status("VmRSS")


def peak_resident_bytes() -> int | None:
    """The most that it had there at any time."""
    return _status("VmHWM")


def storage_bytes_read() -> int | None:
    """By this process so far, not counting what the page cache had; None where the system does not
    tell."""
    return _proc_number("io", "read_bytes")


def _status(key: str) -> int | None:
    found = _proc_number("status", key)
    return None if found is None else found * 1024


def _proc_number(file: str, key: str) -> int | None:
    try:
        for line in Path(f"/proc/self/{file}").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def large_empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory for weights, in large pages where the system has them: reading hundreds
    of megabytes a step, a core spends much of its time looking up small ones."""
    count = math.prod(shape)
    if count * dtype.itemsize < 2 * LARGE_PAGE or _madvise is None:
        return torch.empty(shape, dtype=dtype)
    raw = torch.empty(count + LARGE_PAGE // dtype.itemsize, dtype=dtype)
    start = -raw.data_ptr() % LARGE_PAGE // dtype.itemsize
    aligned = raw[start : start + count]
    _madvise(aligned.data_ptr(), count * dtype.itemsize, mmap.MADV_HUGEPAGE)
    return aligned.view(shape)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()


def send(values: Tensor, device: torch.device | str) -> Tensor:
    """Of the host's own memory to a device. From pinned memory the copy queues up like a kernel:
    the host does not wait for what is before it."""
    to = torch.device(device).type
    if to == values.device.type:
        return values
    if to == META:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def interpreting() -> bool:
    """Whether Triton's kernels run on the CPU, line by line: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def supports_pdl() -> bool:
    """Whether kernels are launched with programmatic dependent launch: set up on the GPU while the
    one before still runs."""
    if interpreting() or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)


def hopper_refusals(capability: tuple[int, int] | None) -> list[str]:
    """Why our kernels for Hopper GPUs do not run on a GPU of this compute capability. They are in
    Gluon, whose names change from one Triton to the next; with these they were checked."""
    if interpreting() or capability is None or capability[0] != HOPPER[0]:
        return [f"needs compute capability {HOPPER[0]}.{HOPPER[1]}"]
    if not version("triton").startswith(f"{GLUON_TRITON}."):
        return [f"checked with Triton {GLUON_TRITON} only, not with {version('triton')}"]
    return []


def compute_capability() -> tuple[int, int] | None:
    """Of the NVIDIA GPU; None where there is none."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability()


@cache
def converts_fp8() -> bool:
    """Whether the GPU's own instructions make numbers of e4m3 codes, where there is a GPU."""
    capability = compute_capability()
    return capability is None or capability >= (8, 9)


@cache
def runs_gluon() -> bool:
    """Whether our kernels for Hopper GPUs run on this machine, whatever the model's dims."""
    return not hopper_refusals(compute_capability())


def to_host(x: Tensor) -> Tensor:
    """A copy on its way to pinned memory: wait for a `mark` made afterwards before reading it. A
    copy on a CPU too, since the next step may write where x is."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def mark() -> Callable[[], None]:
    """Waits until the GPU has done what it was given so far, and no longer."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


class Branch:
    """`with branch:` … `branch.join()`: while a step is captured, kernels launched inside run
    beside those before the join; elsewhere all run in their order. Whoever opens it holds the
    tensors that are read inside until it joins: their memory would be given to others."""

    def __init__(self) -> None:
        self._beside = _second_stream(torch.cuda.current_device()) if _on_gpu() else None
        self._forked = self._beside is not None and torch.cuda.is_current_stream_capturing()

    def __enter__(self) -> None:
        if self._forked:
            assert self._beside is not None
            self._beside.wait_stream(torch.cuda.current_stream())
            self._inside = torch.cuda.stream(self._beside)
            self._inside.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._forked:
            self._inside.__exit__(*error)

    def join(self) -> None:
        if self._forked:
            assert self._beside is not None
            torch.cuda.current_stream().wait_stream(self._beside)


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@cache
def _second_stream(gpu: int) -> torch.cuda.Stream:
    """Made before the first capture: its kernels go first wherever both have some that wait."""
    return torch.cuda.Stream(gpu, priority=-1)  # type: ignore[no-untyped-call]


def recover() -> None:
    """After an error: waits until the GPU has done all that it was given, and gives back memory
    that nobody uses. Raises where the GPU can do no more, as after an error in a kernel."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compiler() -> str | None:
    """The C++ compiler: CXX, or what is usually there."""
    wanted = os.environ.get("CXX")
    found = (shutil.which(name) for name in ([wanted] if wanted else ["c++", "g++", "clang++"]))
    return next((path for path in found if path), None)


def cpu_features() -> str:
    """Instruction sets: code compiled for this CPU must not run on another."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return torch.backends.cpu.get_cpu_capability()


_NARROW = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
ONEDNN_LEVELS = {
    **dict.fromkeys(("sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"), 0),
    **dict.fromkeys(("avx512_core", "avx512_core_vnni"), 0),
    "avx512_core_bf16": 1,
    **dict.fromkeys(("avx512_core_fp16", "avx10_1_512"), 2),
    **dict.fromkeys(("avx512_core_amx", "avx10_1_512_amx"), 3),
    **dict.fromkeys(("avx512_core_amx_fp16", "avx10_1_512_amx_fp16"), 4),
}
"""Of the sets above, how many oneDNN may use when it is held to one of its levels by name."""


def onednn_features() -> frozenset[str]:
    """Which of this CPU's 16-bit instruction sets oneDNN multiplies with. ONEDNN_MAX_CPU_ISA (or
    DNNL_MAX_CPU_ISA) may hold it to fewer; a name that is not listed holds it to nothing."""
    held = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "all"
    allowed = _NARROW[: ONEDNN_LEVELS.get(held.lower(), len(_NARROW))]
    return frozenset(allowed) & frozenset(cpu_features().split())
