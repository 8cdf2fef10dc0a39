"""Kernels in C++ for the CPU: compiled once by the machine's own compiler, kept on disk.

Nothing is shipped compiled, so the code fits the CPU it runs on. Where there is no compiler,
`unavailable()` says so, and the plan takes the implementations in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trueline.device import compiler, cpu_features
from trueline.errors import UsageError
from trueline.utils.environment import cache_directory, native_target

HERE = Path(__file__).parent
SOURCES = tuple(sorted(HERE.glob("*.cpp")))
HEADERS = tuple(sorted(HERE.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off")

TARGETS = {
    "native": (),
    "x86-64-v3": ("avx2", "fma", "f16c"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "off": (),
}
"""What TRUELINE_NATIVE_TARGET may say, and what a CPU must have for it."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_CACHED_ROWS = (_POINTER, _INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _INT, _INT)
SIGNATURES = {
    "pack_weight": (_POINTER, _INT, _INT, _POINTER),
    "pack_gate_up": (_POINTER, _INT, _INT, _POINTER),
    "pack_scaled": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER),
    "gemm": (
        *(_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT),
        *(_INT, _INT, _INT, _INT),
    ),
    "routed": (
        *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _POINTER, _POINTER, _POINTER),
    ),
    "routed_middle": (
        *(_POINTER, _INT, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _POINTER, _POINTER, _POINTER),
    ),
    "routed_down": (
        *(_POINTER, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT, _INT, _INT, _POINTER, _POINTER),
    ),
    "combine": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "route": (
        *(_POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _FLOAT, _INT),
        *(_POINTER, _POINTER),
    ),
    "middle": (_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT, _FLOAT),
    "gated": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _FLOAT),
    "rms_norm": (_POINTER, _INT, _POINTER, _FLOAT, _POINTER, _INT, _INT),
    "rotate": (
        *(_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT),
    ),
    "mla_decode": (
        *(_POINTER, *_CACHED_ROWS, _POINTER, _INT, _POINTER, _INT, _INT, _INT, _FLOAT),
        *(_POINTER, _POINTER),
    ),
    "index_scores": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT),
        *(_INT, _FLOAT, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _INT),
    ),
    "index_topk": (_POINTER, _INT, _POINTER, _INT, _INT, _POINTER),
    "sink_attention": (
        *(_POINTER, *_CACHED_ROWS, *_CACHED_ROWS, _POINTER, _INT, _INT, _POINTER, _INT, _INT),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
        *(_INT, _INT, _FLOAT, _POINTER),
    ),
    "hc_mix": (
        *(_POINTER, _POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT, _INT, _INT, _INT, _INT),
        *(_POINTER, _POINTER, _POINTER),
    ),
    "hc_head": (_POINTER, _POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT, _INT, _INT, _INT, _POINTER),
    "hc_merge": (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER),
    "use_threads": (_INT,),
    "sparse_mla": (
        *(_POINTER, *_CACHED_ROWS, _POINTER, _INT, _POINTER, _INT, _INT, _FLOAT),
        *(_POINTER, _POINTER),
    ),
}

# GEMMs also take weights in bfloat16, and packed as they are stored (bytes), under other names.
SUFFIX = {torch.float32: "", torch.bfloat16: "_bf16", torch.uint8: "_scaled"}
for _name in ("pack_weight", "pack_gate_up"):
    SIGNATURES[f"{_name}_bf16"] = SIGNATURES[_name]
for _name in ("gemm", "middle", "gated", "routed", "routed_middle", "routed_down"):
    for _suffix in ("_bf16", "_scaled"):
        SIGNATURES[f"{_name}{_suffix}"] = SIGNATURES[_name]


class CannotBuild(Exception):
    """Why there are no native kernels here."""


def _on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_tell: Callable[[str], None] = _on_stderr


def tell_builds(to: Callable[[str], None]) -> None:
    """`to` is called when kernels are being compiled, instead of writing to stderr."""
    global _tell
    _tell = to


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(_built()))
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.use_threads(torch.get_num_threads())
    return loaded


def use_threads(count: int) -> None:
    """How many of the machine's threads a kernel may use, ours included."""
    if unavailable() is None:
        library().use_threads(count)


def weighted(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """The kernel for packed weights of this dtype."""
    kernel: Callable[..., None] = getattr(library(), name + SUFFIX[dtype])
    return kernel


def packable(weight: Tensor) -> Tensor:
    """As it is where a kernel takes it, else in float32."""
    return (weight if weight.dtype == torch.bfloat16 else weight.float()).contiguous()


@cache
def panel() -> int:
    """Columns of a panel: they are adjacent in a packed weight."""
    return int(library().panel_width())


@cache
def unavailable() -> str | None:
    """Why there are no native kernels here; None if there are."""
    try:
        library()
    except (CannotBuild, OSError, AttributeError) as error:
        return str(error).splitlines()[0]
    return None


def _target() -> str:
    """Checked: code for another CPU would end the process."""
    target = native_target()
    if target not in TARGETS:
        accepted = ", ".join(TARGETS)
        raise UsageError(f"TRUELINE_NATIVE_TARGET = {target!r}: accepted: {accepted}")
    if target == "off":
        raise CannotBuild("TRUELINE_NATIVE_TARGET is off")
    missing = set(TARGETS[target]) - set(cpu_features().split())
    if missing:
        names = ", ".join(sorted(missing))
        raise CannotBuild(f"TRUELINE_NATIVE_TARGET is {target}, and this CPU has no {names}")
    return target


def _built() -> Path:
    target = _target()
    program = compiler()
    if program is None:
        raise CannotBuild("no C++ compiler (c++, g++ or clang++) on this machine")
    flags = (*FLAGS, f"-march={target}")
    text = (file.read_text() for file in (*SOURCES, *HEADERS))
    made_of = (*text, *flags, program, cpu_features(), torch.__version__)
    name = hashlib.blake2b(repr(made_of).encode(), digest_size=12).hexdigest()
    directory = cache_directory() / "native"
    built = directory / f"{name}.so"
    if not built.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _build(program, flags, built)
    return built


def _build(program: str, flags: tuple[str, ...], built: Path) -> None:
    """Into a directory of its own, then moved: another process may be building the same."""
    start = time.monotonic()
    _tell("compiling C++ kernels for this CPU (once; about 6 s of two free cores)")
    with tempfile.TemporaryDirectory(dir=built.parent) as work:
        compiled = {file: str(Path(work, f"{file.stem}.o")) for file in SOURCES}
        linked = Path(work, "kernels.so")
        with ThreadPoolExecutor() as at_once:
            commands = [
                [program, *flags, "-c", str(file), "-o", to] for file, to in compiled.items()
            ]
            list(at_once.map(_run, commands))
        _run([program, "-shared", "-pthread", *compiled.values(), "-o", str(linked)])
        os.replace(linked, built)
    _tell(f"compiled C++ kernels in {time.monotonic() - start:.1f} s")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise CannotBuild(f"{command[0]} failed: {complaint}")
