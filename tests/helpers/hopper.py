"""Every kernel that a model's steps launch, compiled for a Hopper GPU on a machine that has none.

    python tests/helpers/hopper.py [--once] [--ptx] [--fp8-latents] DIRECTORY...

(of a config.json each) runs the engine as on such a GPU: its plan, its graphs, prompts long and
short, greedy and drawn. A launch compiles its kernel, with the very arguments it would be launched
with, and runs nothing; all numbers are zeros. Tells the kernels, which are in TRITON_CACHE_DIR
then. --once: each kernel for the first arguments only. --ptx: to machine code only where a kernel
has MMAs. --fp8-latents: the latent cache in e4m3fn. Needs TRITON_INTERPRET unset.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import trueline.device as device
import trueline.ops.launch as op_launch
from stored_zeros import StoredZeros
from trueline.config import EngineConfig
from trueline.device import Device
from trueline.models import read_model
from trueline.ops.batched_gemm import cublas as batched_gemm
from trueline.ops.linear import cublas as linear
from trueline.spec.parameters import Parameter
from trueline.weights.value import Weight

SMS = 132
MEMORY = 150 << 30
H200 = Device(
    kind="cuda",
    name="NVIDIA H200",
    threads=1,
    free_memory=MEMORY,
    total_memory=MEMORY,
    compute_capability=device.HOPPER,
)
SHARED_BYTES = 227 << 10
"""That a program can have at most."""
PROMPTS = (1, 3, 70, 700, 2500)
UNTOUCHED = torch.empty
"""Of weights, which nobody reads: to fill them takes longer than to compile."""
LARGE = 1 << 20


class Hopper:
    """What Triton asks a driver for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def pretend(once: bool, ptx: bool) -> dict[str, Any]:
    """From here on this machine has a GPU; the kernels it compiles, by the hash of each."""
    compiled: dict[str, Any] = {}
    seen: set[object] = set()
    triton.runtime.driver.set_active(Hopper())
    run = JITFunction.run
    if ptx:
        assemble = CUDABackend.make_cubin
        CUDABackend.make_cubin = lambda self, ptx, *rest: (
            assemble(self, ptx, *rest) if "wgmma.mma" in ptx else b""
        )

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        if once and self in seen:
            return None
        seen.add(self)
        kernel = run(self, *arguments, **options | {"warmup": True})
        assert kernel.metadata.shared <= SHARED_BYTES, (kernel.name, kernel.metadata.shared)
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    device.supports_pdl = device.runs_gluon = lambda: True
    op_launch.num_sms = lambda _: SMS  # type: ignore[assignment]
    Device.torch = property(lambda _: torch.device("cpu"))  # type: ignore[assignment,method-assign]
    _only_zeros()
    return compiled


def zeros(*shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Memory that costs nothing until somebody reads it; torch writes its zeros."""
    sizes = shape if not shape or isinstance(shape[0], int) else shape[0]
    dtype = dtype or torch.float32
    count = math.prod(sizes)
    data = np.zeros(max(count, 1) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype)[:count].view(sizes)


def _only_zeros() -> None:
    """What nobody computes is zero: indices stay within their tensors."""

    def new(self: Tensor, *shape: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return zeros(*shape, dtype=dtype or self.dtype)

    def gemm(x: Tensor, packed: Tensor) -> Tensor:
        return new(x, len(x), len(packed))

    def heads(x: Tensor, packed: Tensor, to: Tensor | None = None) -> Tensor:
        return new(x, len(x), *packed.shape[:2]) if to is None else to

    def join(parts: Any, dim: int = 0) -> Tensor:
        shape = list(parts[0].shape)
        shape[dim] = sum(x.shape[dim] for x in parts)
        large = math.prod(shape) > LARGE
        return UNTOUCHED(shape, dtype=parts[0].dtype) if large else cat(parts, dim)

    def batched(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
        return new(x, *x.shape[:2], y.shape[2]) if out is None else out

    def joined(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
        if len(weight.parts) == 1:
            return dequantise(weight, dtype)
        return UNTOUCHED(weight.shape, dtype=dtype or weight.dtype)

    torch.bmm = batched  # type: ignore[assignment]
    cat, torch.cat = torch.cat, join  # type: ignore[assignment]
    dequantise, Weight.dequantise = Weight.dequantise, joined  # type: ignore[method-assign]
    torch.Tensor.new_empty = torch.Tensor.new_zeros = new  # type: ignore[assignment,method-assign]
    torch.empty = torch.zeros = zeros
    torch.empty_like = torch.zeros_like = lambda x, **options: new(x, x.shape, **options)
    linear.run = gemm
    linear.run_wide = lambda x, packed: gemm(x, packed).float()
    batched_gemm.run = heads


class Zeros(StoredZeros):
    def plain(self, parameter: Parameter) -> Weight:
        return Weight.of(UNTOUCHED(parameter.shape, dtype=self._dtype))


def run(model: Path, fp8_latents: bool) -> None:
    """Imported here: kernels are made when their modules are."""
    from trueline.engine.core import EngineCore
    from trueline.engine.executor import LocalExecutor
    from trueline.engine.runner import Runner, build_decoder
    from trueline.plan.plan import make_plan
    from trueline.verify.engine import Ask, serve
    from trueline.verify.graphs import again

    spec = read_model(model, {})
    options = EngineConfig(
        max_model_len=4096,
        num_gpu_blocks_override=160,
        device="cuda",
        kv_cache_dtype="e4m3fn" if fp8_latents else "auto",
    )
    plan = make_plan(spec, options, H200)
    cpu = torch.device("cpu")
    weights = Zeros(spec, dtype=plan.weight_dtype, device=cpu, seed=0)
    decoder = build_decoder(spec, plan, weights)
    runner = Runner(spec, plan, decoder, capture=again)
    assert runner.graphs is not None
    with torch.inference_mode():
        runner.graphs.capture_all()
    core = EngineCore(LocalExecutor(runner, threaded=False), plan, options)
    drawn = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "logprobs": 2, "seed": 1}
    asks = [Ask([1] * length, 4, arrives=2 * i) for i, length in enumerate(PROMPTS)]
    serve(core, [*asks, Ask([2] * 40, 4, arrives=3, params=drawn)])
    core.close()


if __name__ == "__main__":
    given = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    found = pretend("--once" in given, "--ptx" in given)
    for model in sys.argv[1:]:
        if model not in given:
            run(Path(model), "--fp8-latents" in given)
    print(json.dumps(sorted({kernel.name for kernel in found.values()})))
