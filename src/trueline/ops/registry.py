"""Every op: its Protocol, and its implementations in the order of preference."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal, overload

import torch

from trueline.ops import (
    batched_gemm,
    compress,
    experts,
    gated_norm,
    hyper_connections,
    index_scores,
    index_write,
    latent_write,
    lightning,
    linear,
    mla_decode,
    mla_prefill,
    mlp,
    qkv_prepare,
    rms_norm,
    rope,
    route,
    row_rounding,
    sampling,
    sink_attention,
    sink_prepare,
    sparse_mla,
    topk,
)
from trueline.ops.capabilities import Capabilities, Context, Opaque, undeclared
from trueline.plugins import Registry, lacking

_DECLARING: Mapping[str, tuple[ModuleType, type]] = {
    "linear": (linear, linear.Linear),
    "batched_gemm": (batched_gemm, batched_gemm.BatchedGemm),
    "mlp": (mlp, mlp.MLP),
    "rms_norm": (rms_norm, rms_norm.RMSNorm),
    "rope": (rope, rope.Rope),
    "latent_write": (latent_write, latent_write.LatentWrite),
    "mla_decode": (mla_decode, mla_decode.MLADecode),
    "mla_prefill": (mla_prefill, mla_prefill.MLAPrefill),
    "lightning": (lightning, lightning.LightningAttention),
    "index_write": (index_write, index_write.IndexWrite),
    "qkv_prepare": (qkv_prepare, qkv_prepare.QKVPrepare),
    "gated_norm": (gated_norm, gated_norm.GatedNorm),
    "hyper_connections": (hyper_connections, hyper_connections.HyperConnections),
    "index_scores": (index_scores, index_scores.IndexScores),
    "topk": (topk, topk.TopK),
    "sparse_mla": (sparse_mla, sparse_mla.SparseMLA),
    "compress": (compress, compress.Compress),
    "sink_attention": (sink_attention, sink_attention.SinkAttention),
    "sink_prepare": (sink_prepare, sink_prepare.SinkPrepare),
    "row_rounding": (row_rounding, row_rounding.RowRounding),
    "route": (route, route.Route),
    "experts": (experts, experts.Experts),
    "sampling": (sampling, sampling.Sampling),
}
OPS: dict[str, tuple[str, ...]] = {
    op: tuple(module.IMPLEMENTATIONS) for op, (module, _) in _DECLARING.items()
}
"""Ours; packages may add more."""


def functions(protocol: type) -> tuple[str, ...]:
    """That a Protocol asks for itself, without those it extends."""
    return tuple(
        name
        for name, value in vars(protocol).items()
        if callable(value) and not name.startswith("_")
    )


FUNCTIONS = {op: functions(protocol) for op, (_, protocol) in _DECLARING.items()}
INVARIANT = {
    "mlp": functions(mlp.InvariantMLP),
    "experts": functions(experts.InvariantExperts),
}
"""Functions that an implementation declared batch-invariant has too."""
CAPTURED = {"sampling": functions(sampling.CapturedSampling)}
"""And one that a graph may hold."""
OPTIONAL = {
    "experts": (*functions(experts.SharedExperts), *functions(experts.AddingExperts)),
    "mla_prefill": functions(mla_prefill.MaskedPrefill),
    "compress": functions(compress.CompressInto),
}


def needed(op: str, declared: Capabilities) -> tuple[str, ...]:
    """The functions of an implementation with these capabilities."""
    invariant = INVARIANT.get(op, ()) if declared.batch_invariant else ()
    captured = CAPTURED.get(op, ()) if declared.capture else ()
    return (*FUNCTIONS[op], *invariant, *captured, *declared.optional)


def _unfit(op: str, found: Any) -> str | None:
    """What is wrong with a package's object, if anything."""
    wrong = undeclared(found)
    if wrong:
        return wrong
    declared: Capabilities = found.capabilities
    unknown = [name for name in declared.optional if name not in OPTIONAL.get(op, ())]
    if unknown:
        accepted = ", ".join(OPTIONAL.get(op, ())) or "none"
        return f"declares optional {', '.join(unknown)}; accepted: {accepted}"
    return lacking(found, needed(op, declared))


REGISTRY = Registry(
    "trueline.ops",
    "op",
    {f"{op}.{name}": f"trueline.ops.{op}.{name}" for op, names in OPS.items() for name in names},
    FUNCTIONS,
    _unfit,
)


def capabilities(op: str, name: str) -> Capabilities:
    """Ours are known without importing what may need a GPU's libraries."""
    if REGISTRY.package(op, name):
        declared: Capabilities = REGISTRY.get(op, name).capabilities
        return declared
    ours: Capabilities = _DECLARING[op][0].IMPLEMENTATIONS[name]
    return ours


def refusals(op: str, name: str, context: Context) -> list[str]:
    """Why an implementation cannot run; most can."""
    declared = capabilities(op, name)
    return declared.elsewhere(context.device) or declared.refusals(context)


def runnable(op: str, dtype: torch.dtype) -> list[str]:
    """Our implementations that run on this CPU, in the order of preference."""
    return [name for name in OPS[op] if not refusals(op, name, Context(dtype=dtype))]


@overload
def implementation(op: Literal["linear"], name: str) -> linear.Linear[Opaque]: ...
@overload
def implementation(op: Literal["batched_gemm"], name: str) -> batched_gemm.BatchedGemm[Opaque]: ...
@overload
def implementation(op: Literal["mlp"], name: str) -> mlp.MLP[Opaque]: ...
@overload
def implementation(op: Literal["rms_norm"], name: str) -> rms_norm.RMSNorm: ...
@overload
def implementation(op: Literal["rope"], name: str) -> rope.Rope: ...
@overload
def implementation(op: Literal["latent_write"], name: str) -> latent_write.LatentWrite: ...
@overload
def implementation(op: Literal["mla_decode"], name: str) -> mla_decode.MLADecode[Opaque]: ...
@overload
def implementation(op: Literal["mla_prefill"], name: str) -> mla_prefill.MLAPrefill[Opaque]: ...
@overload
def implementation(
    op: Literal["lightning"], name: str
) -> lightning.LightningAttention[Opaque, Opaque]: ...
@overload
def implementation(op: Literal["index_write"], name: str) -> index_write.IndexWrite: ...
@overload
def implementation(op: Literal["qkv_prepare"], name: str) -> qkv_prepare.QKVPrepare: ...
@overload
def implementation(op: Literal["gated_norm"], name: str) -> gated_norm.GatedNorm: ...
@overload
def implementation(
    op: Literal["hyper_connections"], name: str
) -> hyper_connections.HyperConnections: ...
@overload
def implementation(op: Literal["index_scores"], name: str) -> index_scores.IndexScores[Opaque]: ...
@overload
def implementation(op: Literal["topk"], name: str) -> topk.TopK: ...
@overload
def implementation(op: Literal["sparse_mla"], name: str) -> sparse_mla.SparseMLA[Opaque]: ...
@overload
def implementation(op: Literal["compress"], name: str) -> compress.Compress[Opaque]: ...
@overload
def implementation(
    op: Literal["sink_attention"], name: str
) -> sink_attention.SinkAttention[Opaque]: ...
@overload
def implementation(op: Literal["sink_prepare"], name: str) -> sink_prepare.SinkPrepare: ...
@overload
def implementation(op: Literal["row_rounding"], name: str) -> row_rounding.RowRounding: ...
@overload
def implementation(op: Literal["route"], name: str) -> route.Route[Opaque]: ...
@overload
def implementation(op: Literal["experts"], name: str) -> experts.Experts[Opaque]: ...
@overload
def implementation(op: Literal["sampling"], name: str) -> sampling.Sampling: ...
@overload
def implementation(op: str, name: str) -> Any: ...
def implementation(op: str, name: str) -> Any:
    """A module, or whatever else has the op's functions."""
    return REGISTRY.get(op, name)
