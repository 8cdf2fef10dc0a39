"""What an implementation of an op, or a layer, declares about itself; and what the plan asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from trueline import device, native
from trueline.cache.layout import IndexLayout, LatentLayout
from trueline.native import scaled
from trueline.spec.mixer import MLASpec

HALF_PRECISION = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALF_PRECISION)


class Opaque:
    """What an op's `pack` or `prepare` returns: only the implementation that made it looks
    inside. Never instantiated; a type that nothing else has."""


@dataclass(frozen=True, slots=True)
class HeadDims:
    """Heads of latent attention on this rank, and the widths that are a head's own."""

    count: int
    nope: int
    value: int

    @staticmethod
    def of(mixer: MLASpec) -> HeadDims:
        return HeadDims(mixer.heads.count, mixer.qk_nope_head_dim, mixer.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an implementation is to run with, as far as it is known at load. What a model does not
    have is None."""

    dtype: torch.dtype
    """Of computation, and of the latent cache where its layout says no other."""
    device: str = "cpu"
    compute_capability: tuple[int, int] | None = None
    """Of an NVIDIA GPU."""
    batch_invariant: bool = False
    numerics: str = "weights"
    """How weights of the format that is packed are multiplied: with activations as computed, or
    "activations": with what fp8 makes of them."""
    heads: HeadDims | None = None
    latent: LatentLayout | None = None
    index: IndexLayout | None = None


def _no_more_reasons(context: Context) -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] | None = None
    """Of computation; None: any."""
    weight_dtypes: tuple[torch.dtype, ...] = ()
    """That `pack` keeps although they are not the dtype of computation."""
    formats: tuple[str, ...] | None = None
    """Labels of the weight formats whose weights `pack` takes as they are stored, and no others.
    None: it takes all, and dequantises those that it does not keep."""
    keeps: tuple[str, ...] = ()
    """Where `formats` is None: labels of the formats whose weights `pack` keeps as they are
    stored."""
    numerics: tuple[str, ...] = ("weights",)
    """That its products have. One that leaves them to the op `linear` has all."""
    batch_invariant: bool = False
    """Whether a row's bits depend on nothing but the row, whatever shares its step."""
    capture: bool = False
    """Whether a CUDA graph may hold it: `prepare` takes tables on the device, and the host never
    waits."""
    optional: tuple[str, ...] = ()
    """Functions that the op's contract calls optional, and that it has."""
    preferred: bool = False
    """Of a package's: whether the plan takes it without being asked."""
    refuses: Callable[[Context], list[str]] = _no_more_reasons
    """Further reasons, which depend on dims, layouts or the machine."""

    def elsewhere(self, device: str) -> list[str]:
        return [] if device in self.devices else [f"runs on {' and '.join(self.devices)}"]

    def not_packed(self, stored: str) -> list[str]:
        """Why it does not take weights of a format."""
        if self.formats is None or stored in self.formats:
            return []
        return [f"packs {' and '.join(self.formats)} weights, not {stored} ones"]

    def packs(self, stored: str, numerics: str) -> bool:
        """Whether it takes weights of a format, and multiplies as is wanted."""
        return not self.not_packed(stored) and numerics in self.numerics

    def as_stored(self, stored: str) -> bool:
        """Whether weights of a format that it takes stay as they are stored."""
        return stored in (self.keeps if self.formats is None else self.formats)

    def refusals(self, context: Context) -> list[str]:
        """Why it cannot run, on one of its devices; empty if it can."""
        reasons: list[str] = []
        if self.dtypes is not None and context.dtype not in self.dtypes:
            reasons.append(_other_dtype(context.dtype, self.dtypes))
        if context.numerics not in self.numerics:
            reasons.append(f"numerics of {' and '.join(self.numerics)}, not of {context.numerics}")
        if context.batch_invariant and not self.batch_invariant:
            reasons.append("not batch-invariant: a row's bits depend on the batch")
        return reasons or self.refuses(context)


def _other_dtype(dtype: torch.dtype, accepted: Sequence[torch.dtype]) -> str:
    *first, last = (str(each).removeprefix("torch.") for each in accepted)
    return f"{dtype} is not {', '.join(first)} or {last}" if first else f"{last} only"


def undeclared(found: object) -> str | None:
    """What is wrong with a package's declaration, if anything."""
    declared = getattr(found, "capabilities", None)
    if isinstance(declared, Capabilities):
        return None
    return (
        "declares no capabilities: set `capabilities = Capabilities(devices=…)`, "
        "of trueline.ops.capabilities"
    )


def _needs_native(context: Context) -> list[str]:
    reason = native.unavailable()
    return [reason] if reason else []


CPU = Capabilities(devices=("cpu",), batch_invariant=True)
NATIVE = Capabilities(
    devices=("cpu",),
    dtypes=(torch.float32,),
    weight_dtypes=(torch.bfloat16,),
    batch_invariant=True,
    refuses=_needs_native,
)
NATIVE_PACKING = replace(NATIVE, keeps=scaled.FORMATS)
"""Of the ops that keep weights."""
NATIVE_ACTIVATIONS = replace(NATIVE, dtypes=FLOATS, weight_dtypes=())
"""Of the ops that have no weights of a GEMM's size; they read numbers of 16 bits too."""
NUMERICS = ("weights", "activations")
"""Of an implementation that leaves all products to the op `linear`."""
PUBLISHED = "published"
"""Numerics of the layers of compressed attention: what they keep is rounded. Products have
`weights` then."""
GPU = Capabilities(devices=("cuda",), dtypes=FLOATS, capture=True)
"""Ours for an NVIDIA GPU, which are not batch-invariant so far."""


def fp8_latent_refusals(context: Context) -> list[str]:
    """Of kernels for an NVIDIA GPU that write or read the latent cache."""
    layout = context.latent
    if layout is not None and layout.fp8 is not None and layout.fp8.storage == "e4m3fnuz":
        return ["e4m3fnuz is no number format of this device: e4m3fn is"]
    if layout is not None and layout.fp8 is not None and layout.num_groups > MOST_SCALES:
        return [f"reads up to {MOST_SCALES} scales of a latent, not {layout.num_groups}"]
    return []


def _hopper_refusals(context: Context) -> list[str]:
    return device.hopper_refusals(context.compute_capability)


HOPPER_FP8 = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16,),
    formats=("block fp8",),
    numerics=("activations",),
    capture=True,
    refuses=_hopper_refusals,
)
"""Of the ops that multiply fp8 with fp8."""
HOPPER_W4A16 = replace(HOPPER_FP8, formats=("int4", "fp4"), numerics=("weights",))
MOST_SCALES = 16
"""Of a cache row: kernels for an NVIDIA GPU hold them all in registers."""
GPU_LATENT = replace(GPU, refuses=fp8_latent_refusals)
